"""Where processes cannot go on in place, they are started again: after faults in a row, or where JAX lacks a part."""

import json
import os
import subprocess
import sys

import pytest
from support.processes import SETTINGS, make_environment

HIDDEN = """
from jax._src.lib import _jax

_start = _jax.get_distributed_runtime_service


def get_distributed_runtime_service(*arguments, **options):
    return _start(*arguments, **options)


_jax.get_distributed_runtime_service = get_distributed_runtime_service
"""

# Nothing connects in the first two processes; those that take their place can.
FAILING = """
import os
from pathlib import Path

import podscale.processes.private_jax as private_jax

_connect = private_jax.connect


def connect(*arguments):
    from jax.errors import JaxRuntimeError

    with Path(__file__).with_name("pids").open("a+") as file:
        file.seek(0)
        pids = file.read().split()
        if str(os.getpid()) not in pids:
            print(os.getpid(), file=file, flush=True)
    if str(os.getpid()) in pids[:2] or len(pids) < 2:
        raise JaxRuntimeError("UNAVAILABLE: nothing listens here")
    _connect(*arguments)


private_jax.connect = connect
"""


def launch(tmp_path, changes):
    """Train digits in two processes in which these changes are made before anything else."""
    (tmp_path / "sitecustomize.py").write_text(changes)
    launch = ["launch", "-n", "2", "--elastic", "1:2", "train", *SETTINGS, "--run", str(tmp_path / "run")]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    command, environment = [sys.executable, "-m", "podscale", *launch], make_environment(PYTHONPATH=path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
@pytest.mark.processes(2)
def test_processes_that_cannot_form_a_generation_again_and_again_are_started_again(tmp_path):
    done = launch(tmp_path, FAILING)
    assert "podscale: 6 generations in a row have failed" in done.stderr
    assert "all processes are started again and resume from the last checkpoint" in done.stderr
    assert json.loads(done.stdout)["steps"] > 0


@pytest.mark.slow
@pytest.mark.processes(2)
def test_without_a_private_part_of_jax_the_run_is_launched_with_restarts(tmp_path):
    done = launch(tmp_path, HIDDEN)
    sentence = "this version of JAX lacks the option recoverable of jaxlib._jax.get_distributed_runtime_service"
    assert f"podscale: {sentence}, which --elastic needs; so if a process is lost, all are started again" in done.stderr
    assert json.loads(done.stdout)["steps"] > 0
