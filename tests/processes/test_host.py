"""A process that may open too few files is refused at its start; one that may raise its limit does."""

import subprocess
import sys

import pytest


@pytest.mark.heavy
@pytest.mark.parametrize(("soft", "hard", "expected"), [(20, 20, 2), (40, 40, 2), (40, 4096, 0)])
def test_too_low_a_limit_of_open_files_is_raised_or_refused(soft, hard, expected):
    command = [sys.executable, "-m", "podscale", "plan", "digits", "--pod.virtual", "1x1", "--json"]
    done = subprocess.run(
        ["prlimit", f"--nofile={soft}:{hard}", *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == expected, done.stderr[-2000:]
    assert ("podscale: this process may open" in done.stderr and "ulimit -n 4096" in done.stderr) == bool(expected)
    assert "Traceback" not in done.stderr
