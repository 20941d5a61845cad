"""The command line in real processes, as on a machine without accelerators."""

import json
import os

import pytest
from support.forked import run_forked


def run_podscale(folder, *arguments):
    """Run the program in a folder, as on a machine without accelerators."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    return run_forked(folder, [*map(str, arguments)], environment, timeout_s=300)


def run_json(folder, *arguments):
    """Run a command and return the one JSON object that it prints."""
    done = run_podscale(folder, *arguments)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    result = json.loads(done.stdout, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert isinstance(result, dict)
    assert done.stdout.count("\n") == 1
    return result


def run_refused(folder, *arguments):
    """Run a command that is refused, and return its one sentence."""
    done = run_podscale(folder, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("podscale: ")
    return done.stderr.removeprefix("podscale: ").rstrip("\n")
