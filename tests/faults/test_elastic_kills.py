"""Random processes of an elastic run are killed at random moments: it goes on, repeats little and learns the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import make_environment

AMPLIFIED = 500  # steps, in which training makes rounding of other sums not much larger; see docs/elastic.md
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "elastic.py"


@pytest.mark.slow
@pytest.mark.processes(4)
@pytest.mark.parametrize("seed", [1, 2])
def test_an_elastic_run_survives_kills_at_random_moments(tmp_path, seed):
    arguments = ["--kills", "10", "--seed", str(seed), "--steps", "1500", "--cache", "user", "--folder", str(tmp_path)]
    command = [sys.executable, str(BENCHMARK), *arguments]
    done = subprocess.run(command, env=make_environment(), capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout[done.stdout.index("{") :])
    assert results["exit code"] in (0, 75)
    assert results["recoveries timed"] > 0
    assert len(results["kills in each state"]) > 1
    assert results["steps repeated, most"] <= 5
    differences = results["greatest relative difference of the loss, up to a step"]
    assert max(differences[step] for step in differences if int(step) <= AMPLIFIED) < 1e-6
    first, last = (results[f"the process never killed, {time} generation"] for time in ("first", "last"))
    assert last["threads"] <= first["threads"] + 4
    assert last["descriptors"] <= first["descriptors"] + 4
    assert last["rss_mb"] <= max(600, 1.2 * first["rss_mb"])
