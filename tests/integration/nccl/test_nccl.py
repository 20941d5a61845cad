"""Several ranks train what one process trains, and end as documented when one of them is lost.

With a GPU, as NCCL ranks on that one GPU; all cases share three groups of processes. Without one, a few cases run over
Gloo, which shows that the driver and its comparisons work.
"""

import json
import subprocess
import sys

import pytest
from integration.nccl import faults
from integration.nccl.cases import GROUPS
from integration.nccl.ranks import HERE, has_gpu

NAMES = [case.name for cases in GROUPS.values() for case in cases] + [fault.name for fault in faults.FAULTS]
OVER_GLOO = ["sums of every strategy and payload", "the third on 1 rank", "fused layers over tiles"]


def run_suite(folder, *options):
    """Return the rows of the suite's table by name."""
    results = folder / "results.json"
    command = [sys.executable, str(HERE / "suite.py"), "--results", str(results), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert results.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout)
    return {row["name"]: row for row in json.loads(results.read_text())}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """All results, from one GPU."""
    return run_suite(tmp_path_factory.mktemp("nccl"))


@pytest.mark.slow
@pytest.mark.skipif(not has_gpu(), reason="there is no NVIDIA GPU here")
@pytest.mark.parametrize("name", [*NAMES, faults.RESTART])
def test_nccl_ranks_on_one_gpu(rows, name):
    assert rows[name]["right"], rows[name]


@pytest.mark.slow
@pytest.mark.processes(4)
def test_the_same_cases_over_gloo(tmp_path):
    rows = run_suite(tmp_path, "--platform", "cpu", "--faults", "--only", *OVER_GLOO)
    assert {name: row["right"] for name, row in rows.items()} == dict.fromkeys(rows, True), rows
    assert set(OVER_GLOO) <= set(rows)
    assert rows["the third on 1 rank"]["difference"] < 1e-9
