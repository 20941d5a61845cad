"""Training under real launchers, Open MPI and Slurm, gives the result of one process with as many devices."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from support.processes import (
    SETTINGS,
    STEPS,
    assert_same_to_rounding,
    make_environment,
    start,
    wait_for_step,
    wait_for_success,
)
from support.slurm import explain_missing, start_slurm

ROOT = Path(__file__).parents[2]
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"
NO_MPI = "" if shutil.which("mpirun") else "needs Debian's openmpi-bin: there is no mpirun"
NO_SLURM = explain_missing()
PROCESSES = [2, pytest.param(4, marks=pytest.mark.slow)]  # of a pod of four devices
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with start_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.mark.processes(4)
@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_mpirun_trains_the_same_as_one_process(tmp_path, undisturbed_run, processes):
    command = [ROOT / "examples" / "mpi.sh", *SETTINGS, "--pod.virtual", "2x2", "--run", tmp_path / "run"]
    out, err = wait_for_success(start(command, PATH=PATH, MPIRUN=f"mpirun -n {processes} --oversubscribe", **AS_ROOT))
    assert json.loads(out)["steps"] == STEPS
    assert f"cpu, 2x2 torus, {processes} hosts" in err
    assert_same_to_rounding(tmp_path / "run", undisturbed_run)


@pytest.mark.processes(4)
@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)
def test_srun_trains_the_same_as_one_process(tmp_path, cluster, undisturbed_run, processes):
    command = ["srun", "-n", str(processes), "--overcommit", "podscale", "train", *SETTINGS, "--pod.virtual", "2x2"]
    command += ["--run", tmp_path / "run"]
    out, err = wait_for_success(start(command, PATH=PATH, **cluster.environment))
    assert json.loads(out)["steps"] == STEPS
    assert f"cpu, 2x2 torus, {processes} hosts" in err
    assert_same_to_rounding(tmp_path / "run", undisturbed_run)


@pytest.mark.slow
@pytest.mark.processes(4)
@pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)
def test_a_slurm_job_resumes_after_sigterm_and_after_a_requeue(tmp_path, cluster, undisturbed_run):
    """The example script: SIGTERM to its tasks, as before a time limit; `scontrol requeue`; then to the end."""
    run, log = tmp_path / "run", tmp_path / "job.log"
    script = [ROOT / "examples" / "slurm.sh", *SETTINGS, "--run", run]
    options = ["-n", "4", "--overcommit", f"--output={log}"]
    job = cluster.submit(*options, *script, environment=make_environment(PATH=PATH))
    watched = _SlurmJob(cluster, job, log)
    wait_for_step(run, 5, watched)
    cluster.run("scancel", "--signal=TERM", job)
    _wait_for_text(log, "resuming after step", 1, watched)
    wait_for_step(run, 18, watched)
    cluster.run("scontrol", "requeue", job)
    assert cluster.wait(job, timeout_s=900) == "COMPLETED", log.read_text()[-3000:]
    output = log.read_text()
    assert "exit code 75: back to the queue (restart 1 of at most 50)" in output
    assert output.count("resuming after step") == 2
    assert f'"steps": {STEPS}' in output
    assert_same_to_rounding(run, undisturbed_run)


class _SlurmJob:
    """A Slurm job with the methods of a process that test helpers use."""

    def __init__(self, cluster, number, log):
        self._cluster, self._number, self._log = cluster, number, log

    def poll(self):
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return 1 if self._cluster.show_job(self._number)["JobState"] in ended else None

    def kill(self):
        self._cluster.run("scancel", "-s", "KILL", self._number, check=False)

    def communicate(self):
        return "", self._log.read_text(errors="replace") + self._cluster.read_logs()


def _wait_for_text(log, text, times, job):
    deadline = time.monotonic() + 900
    while log.read_text().count(text) < times:
        assert time.monotonic() < deadline, job.communicate()[1][-3000:]
        assert job.poll() is None, job.communicate()[1][-3000:]
        time.sleep(0.2)
