"""Real launchers, Open MPI and Slurm, start what trains like one process with as many devices; so do the examples."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from support.processes import alone, assert_same_to_rounding, environment, started, succeeded, until_step
from support.slurm import missing, slurm

ROOT = Path(__file__).parents[2]
SETTINGS = "digits --model.width 8 --model.precision float64 --train.epochs 2 --train.eval_epochs 1 --json".split()
LONGER = [*SETTINGS, "--train.epochs", "3"]
STEPS, LONGER_STEPS = 23, 34
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"
NO_MPI = "" if shutil.which("mpirun") else "needs Debian's openmpi-bin: there is no mpirun"
NO_SLURM = missing()
PROCESSES = [2, pytest.param(4, marks=pytest.mark.slow)]  # of a pod of four devices
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The run of one process with four devices, by its settings."""
    known = {}

    def find(settings):
        if tuple(settings) not in known:
            folder = known[tuple(settings)] = tmp_path_factory.mktemp("one") / "run"
            alone(folder, "2x2", settings)
        return known[tuple(settings)]

    return find


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.mark.processes(4)
@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_mpirun_trains_what_one_process_trains(tmp_path, one_process, processes):
    command = [ROOT / "examples" / "mpi.sh", *SETTINGS, "--pod.virtual", "2x2", "--run", tmp_path / "run"]
    out, err = succeeded(started(command, PATH=PATH, MPIRUN=f"mpirun -n {processes} --oversubscribe", **AS_ROOT))
    assert json.loads(out)["steps"] == STEPS
    assert f"cpu, 2x2 torus, {processes} hosts" in err
    assert_same_to_rounding(tmp_path / "run", one_process(SETTINGS))


@pytest.mark.processes(4)
@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)
def test_srun_trains_what_one_process_trains(tmp_path, cluster, one_process, processes):
    command = ["srun", "-n", str(processes), "--overcommit", "podscale", "train", *SETTINGS, "--pod.virtual", "2x2"]
    command += ["--run", tmp_path / "run"]
    out, err = succeeded(started(command, PATH=PATH, **cluster.environment))
    assert json.loads(out)["steps"] == STEPS
    assert f"cpu, 2x2 torus, {processes} hosts" in err
    assert_same_to_rounding(tmp_path / "run", one_process(SETTINGS))


@pytest.mark.slow
@pytest.mark.processes(4)
@pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)
def test_a_slurm_job_that_is_asked_to_stop_and_one_that_is_requeued_goes_on(tmp_path, cluster, one_process):
    """The example's script: SIGTERM to its tasks, as before a time limit; `scontrol requeue`; then to its end."""
    run, log = tmp_path / "run", tmp_path / "job.log"
    script = [ROOT / "examples" / "slurm.sh", *LONGER, "--run", run]
    asked = ["-n", "4", "--overcommit", f"--output={log}"]
    job = cluster.submit(*asked, *script, environment=environment(PATH=PATH))
    watched = _Job(cluster, job, log)
    until_step(run, 5, watched)
    cluster.run("scancel", "--signal=TERM", job)
    _until_said(log, "resuming after step", 1, watched)
    until_step(run, 18, watched)
    cluster.run("scontrol", "requeue", job)
    assert cluster.wait(job, timeout_s=900) == "COMPLETED", log.read_text()[-3000:]
    said = log.read_text()
    assert "exit code 75: back to the queue (restart 1 of at most 50)" in said
    assert said.count("resuming after step") == 2
    assert f'"steps": {LONGER_STEPS}' in said
    assert_same_to_rounding(run, one_process(LONGER))


class _Job:
    """A Slurm job where a test helper wants a process."""

    def __init__(self, cluster, number, log):
        self._cluster, self._number, self._log = cluster, number, log

    def poll(self):
        ended = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
        return 1 if self._cluster.job(self._number)["JobState"] in ended else None

    def kill(self):
        self._cluster.run("scancel", "-s", "KILL", self._number, check=False)

    def communicate(self):
        return "", self._log.read_text(errors="replace") + self._cluster.logs()


def _until_said(log, words, times, job):
    deadline = time.monotonic() + 900
    while log.read_text().count(words) < times:
        assert time.monotonic() < deadline, job.communicate()[1][-3000:]
        assert job.poll() is None, job.communicate()[1][-3000:]
        time.sleep(0.2)
