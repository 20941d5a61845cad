"""A process dies at a moment of a save, under each launcher: it is named, all end, and the run starts again."""

import json
import os
import sys
from pathlib import Path

import pytest
from integration.test_launchers import AS_ROOT, NO_MPI, NO_SLURM
from support.dying import write_dying_site
from support.processes import STEPS, make_environment, start, start_launcher, wait_for_exit, wait_for_success
from support.slurm import start_slurm

ROOT = Path(__file__).parents[2]
SETTINGS = "digits --model.width 8 --model.precision float64 --train.epochs 3 --train.eval_epochs 3 --json".split()
MORE = ["--pod.virtual", "1x2", "--plan.save_steps", "5", "--pod.heartbeat_s", "30"]
MOMENTS = ["start", "written", "commit"]  # before it writes, before it reports, before it knows of the commit
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"
PEER_LOST = 69


@pytest.fixture(params=MOMENTS)
def site(tmp_path, request):
    return write_dying_site(tmp_path / "site", request.param, victim=1)


@pytest.mark.slow
@pytest.mark.processes(2)
def test_launch_ends_with_69_and_the_name_and_starts_again(tmp_path, site, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(site))
    launcher = start_launcher(2, tmp_path / "run", *MORE)
    (code,), ((_, err),) = wait_for_exit([launcher])
    assert code == PEER_LOST, err[-3000:]
    assert "process 1 was killed by SIGKILL" in err
    (site / "died").unlink()
    out, err = wait_for_success(start_launcher(2, tmp_path / "run", *MORE, launch=["--restarts", 1]))
    assert "process 1 was killed by SIGKILL; starting again (1 of 1)" in err
    assert "resuming after step" in err
    assert json.loads(out)["steps"] == STEPS


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_the_mpi_example_ends_with_69_and_the_name_and_starts_again(tmp_path, site):
    command = [ROOT / "examples" / "mpi.sh", *SETTINGS, *MORE, "--run", tmp_path / "run"]
    settings = AS_ROOT | {"PATH": PATH, "PYTHONPATH": str(site), "MPIRUN": "mpirun -n 2 --oversubscribe"}
    (code,), ((out, err),) = wait_for_exit([start(command, MOST_RESTARTS="0", **settings)])
    assert code == PEER_LOST, err[-3000:]
    assert "process rank 1" in out + err or "process 1 on" in err
    (site / "died").unlink()
    out, err = wait_for_success(start(command, MOST_RESTARTS="1", **settings))
    assert "exit code 69: starting again (1 of 1)" in err
    assert "resuming after step" in err
    assert json.loads(out.splitlines()[-1])["steps"] == STEPS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with start_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)
def test_the_slurm_example_ends_with_69_and_the_name_and_is_requeued(tmp_path, site, cluster):
    script = [ROOT / "examples" / "slurm.sh", *SETTINGS, *MORE, "--run", tmp_path / "run"]

    def run_job(log, most_restarts):
        environment = make_environment(PATH=PATH, PYTHONPATH=str(site), MOST_RESTARTS=str(most_restarts))
        job = cluster.submit("-n", "2", "--overcommit", f"--output={log}", *script, environment=environment)
        return cluster.wait(job, timeout_s=600), cluster.show_job(job)["ExitCode"]

    log = tmp_path / "once.log"
    assert run_job(log, 0) == ("FAILED", f"{PEER_LOST}:0"), log.read_text()[-3000:]
    assert "task 1: Killed" in log.read_text() or "process 1 on" in log.read_text()
    (site / "died").unlink()
    log = tmp_path / "requeued.log"
    assert run_job(log, 50) == ("COMPLETED", "0:0"), log.read_text()[-3000:]
    assert "exit code 69: back to the queue (restart 1 of at most 50)" in log.read_text()
    assert "resuming after step" in log.read_text()
    assert f'"steps": {STEPS}' in log.read_text()
