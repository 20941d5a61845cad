"""A real Slurm that cancels, drains, ends and requeues a job of the example script; it always resumes."""

import os
import sys
from pathlib import Path

import pytest
from integration.test_launchers import _SlurmJob, _wait_for_text
from support.processes import make_environment, wait_for_step
from support.slurm import explain_missing, start_slurm

ROOT = Path(__file__).parents[2]
SETTINGS = "digits --model.width 8 --train.eval_epochs 100 --plan.save_steps 10 --json --pod.virtual 1x2".split()
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"
NO_SLURM = explain_missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes(2),
    pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with start_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


class Job:
    """A job of the example script, with its log and its run."""

    def __init__(self, cluster, folder, epochs, *options):
        self.cluster, self.run, self.log = cluster, folder / "run", folder / "job.log"
        script = [ROOT / "examples" / "slurm.sh", *SETTINGS, "--train.epochs", str(epochs), "--run", self.run]
        options = ["-n", "2", "--overcommit", f"--output={self.log}", *options]
        self.number = cluster.submit(*options, *script, environment=make_environment(PATH=PATH))
        self.watched = _SlurmJob(cluster, self.number, self.log)

    def wait_for_step(self, step):
        wait_for_step(self.run, step, self.watched)

    def wait(self):
        return self.cluster.wait(self.number, timeout_s=900)


def test_a_job_that_is_cancelled_saves_and_the_next_one_resumes(tmp_path, cluster):
    job = Job(cluster, tmp_path, 1000)
    job.wait_for_step(15)
    cluster.run("scancel", job.number)
    assert job.wait() == "CANCELLED"
    second = Job(cluster, tmp_path, 1000)
    _wait_for_text(second.log, "resuming after step", 1, second.watched)
    second.watched.kill()
    second.wait()


def test_a_job_on_a_node_that_is_drained_goes_on_and_ends(tmp_path, cluster):
    """Slurm starts no further job on such a node, and lets the one that runs there end."""
    job = Job(cluster, tmp_path, 30)
    job.wait_for_step(15)
    node = cluster.show_job(job.number)["NodeList"]
    cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    try:
        assert job.wait() == "COMPLETED", job.log.read_text()[-3000:]
    finally:
        cluster.run("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_job_saves_before_its_time_limit_and_goes_back_to_the_queue(tmp_path, cluster):
    """Slurm counts in minutes; SIGTERM comes about a minute before the limit."""
    job = Job(cluster, tmp_path, 100000, "--time=2", "--signal=TERM@60")
    job.wait_for_step(5)
    _wait_for_text(job.log, "exit code 75: back to the queue (restart 1 of at most 50)", 1, job.watched)
    _wait_for_text(job.log, "resuming after step", 1, job.watched)
    job.watched.kill()
    job.wait()


def test_ten_requeues_in_a_row_lose_nothing_that_was_saved(tmp_path, cluster):
    job = Job(cluster, tmp_path, 3000)
    for requeue in range(10):
        job.wait_for_step(5)
        _wait_for_text(job.log, "resuming after step", requeue, job.watched)
        cluster.run("scontrol", "requeue", job.number)
        _wait_for_text(job.log, "resuming after step", requeue + 1, job.watched)
    job.watched.kill()
    job.wait()
    resumed = [line.rpartition(" ")[2] for line in job.log.read_text().splitlines() if "resuming after" in line]
    steps = [int(step.replace(",", "")) for step in resumed]
    assert steps == sorted(steps)
    assert "Traceback" not in job.log.read_text()
