"""On a JAX that lacks what elastic runs need, lost processes are handled by restarts, and the launcher says so."""

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


@pytest.mark.slow
@pytest.mark.processes(2)
def test_without_a_private_part_of_jax_the_run_is_launched_with_restarts(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    launch = ["launch", "-n", "2", "--elastic", "1:2", "train", *SETTINGS, "--run", str(tmp_path / "run")]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    command, environment = [sys.executable, "-m", "podscale", *launch], make_environment(PYTHONPATH=path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sentence = "this version of JAX lacks the option recoverable of jaxlib._jax.get_distributed_runtime_service"
    assert f"podscale: {sentence}, which --elastic needs; so if a process is lost, all are started again" in done.stderr
    assert json.loads(done.stdout)["steps"] > 0
