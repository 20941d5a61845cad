"""A disk that fills up in the last save of several processes: bounded waiting, the result, and nothing lost."""

import json
import re
import tempfile
import time
from pathlib import Path

import pytest
from faults.chaos import small_disk
from support.patched_site import write_site
from support.processes import STEPS, start_launcher, wait_for_exit, wait_for_success

USER_ERROR = 2
PROCESSES, SAVE_STEPS = 4, 12
MORE = ["--pod.virtual", "2x2", "--plan.save_steps", SAVE_STEPS, "--plan.timeout_s", 25, "--pod.heartbeat_s", 30]

# All processes meet before the first attempt at the last save; then the disk has space for a share of it.
PATCH = """
import time

def patch():
    from podscale.training.checkpoint.checkpoints import Checkpoints
    run, filler, ready = map(Path, {paths!r})
    work = Checkpoints.save

    def get_step(path):
        return int(path.name)

    def fill():
        newest = max((path for path in (run / "checkpoints").glob("[0-9]*") if path.name.isdecimal()), key=get_step)
        size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                os.truncate(filler, filler.stat().st_size - int({share!r} * size))
        ready.touch()

    def save(self, step, *args, **more):
        if step == {last!r} and not ready.exists():
            self.wait()  # the one before is complete
            if find_number() == 0:
                fill()
            while not ready.exists():
                time.sleep(0.01)
        return work(self, step, *args, **more)

    Checkpoints.save = save
"""


@pytest.fixture
def disk():
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name) / "disk") as place:
        if place is None:
            pytest.skip("needs root, to mount a small disk")
        yield place


@pytest.fixture
def full_at_end(disk, tmp_path, monkeypatch):
    """A function that makes the disk full in the last save, but for a share of it; returns the run and the filler."""

    def prepare(share):
        paths = [str(path) for path in (disk / "run", disk / "filler", tmp_path / "ready")]
        site = write_site(tmp_path / "site", PATCH.format(paths=paths, share=share, last=STEPS))
        monkeypatch.setenv("PYTHONPATH", str(site))
        return disk / "run", disk / "filler"

    return prepare


def list_steps(run):
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal())


@pytest.mark.slow
@pytest.mark.processes(4)
@pytest.mark.parametrize("share", [0, 0.4, 0.9])
def test_a_disk_that_stays_full_ends_the_run_with_its_result(full_at_end, share):
    run, filler = full_at_end(share)
    launcher = start_launcher(PROCESSES, run, *MORE)
    (code,), ((out, err),) = wait_for_exit([launcher])
    assert code == USER_ERROR, err[-3000:]
    assert json.loads(out)["steps"] == STEPS
    assert re.search(r"did not accept the last checkpoint for \d+ s: No space left on device", err)
    assert "Traceback" not in err
    saved = list_steps(run)
    assert saved[-1] == 24
    filler.unlink()
    out, err = wait_for_success(start_launcher(PROCESSES, run, *MORE))
    assert "resuming after step 24" in err
    assert json.loads(out)["steps"] == STEPS
    assert list_steps(run)[-1] == STEPS


@pytest.mark.slow
@pytest.mark.processes(4)
def test_a_disk_that_has_space_again_takes_the_last_checkpoint(full_at_end):
    run, filler = full_at_end(0.4)
    launcher = start_launcher(PROCESSES, run, *MORE)
    deadline, warned = time.monotonic() + 600, False
    while not warned and time.monotonic() < deadline and launcher.poll() is None:
        warned = "disk full" in launcher.stderr.readline()
    filler.unlink()
    out, err = wait_for_success(launcher)
    assert warned
    assert json.loads(out)["steps"] == STEPS
    assert list_steps(run)[-1] == STEPS
    assert "Traceback" not in err
