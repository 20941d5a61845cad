"""A minute of the randomized fault campaign, with a seed of its own; `make chaos` runs more of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("chaos.py")


@pytest.mark.heavy
@pytest.mark.processes(4)
def test_a_minute_of_faults_is_survived_and_a_second_slice_goes_on(tmp_path):
    results = tmp_path / "results.jsonl"
    for trials, seconds in enumerate(("40", "1"), start=1):
        command = [sys.executable, str(SCRIPT), "--seed", "7", "--seconds", seconds, "--results", str(results)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        assert [line["trial"] for line in lines] == list(range(len(lines)))
        assert len(lines) >= trials
    assert not any(line["problem"] for line in lines)
    assert "0 not survived" in done.stdout
