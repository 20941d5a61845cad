"""How a program ends that cannot go on: quickly, with one sentence, its own exit code, and nobody left waiting."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from podscale.training import step

TIMEOUT_S = 120


# A shell in the background has its children ignore Ctrl-C; the program under test must hear it.
HEEDING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


def start(*arguments, **variables):
    command = [sys.executable, "-c", HEEDING, sys.executable, "-m", "podscale", "train", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"} | variables
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def test_ctrl_c_while_compiling_ends_with_its_own_code(tmp_path):
    process = start("digits", "--run", str(tmp_path / "run"))
    deadline = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "run" / "sample.png").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # the sample is the last thing before compilation
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "podscale: interrupted; the same command goes on from the last checkpoint"
    assert "Traceback" not in errors


DROPPED = """
import gc, signal, sys, time
from podscale.cli import main as cli

def collecting(phase, _):
    if phase == "stop" and not interrupted:
        interrupted.append(True)
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)  # here Python raises, and drops what it raised

cli._heed_interrupts()
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupted = []
gc.callbacks.append(collecting)
try:
    gc.collect()
    time.sleep(20)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_a_garbage_collection_is_heard():
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


TINY = "--model.name resnet8 --model.stem small --model.width 8 --data.image_size 16".split()


def photos(root, side, count=16):
    """A folder of large pictures: most of the time of training on them goes into loading."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    for split in ("train", "val"):
        for name in ("cats", "dogs"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(pixels).save(root / split / name / f"{i}.jpg")
    return root


def session(leader):
    """Processes of the session that a process began, itself apart."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # it may just have ended
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and int(entry) != leader:
                    found.append(int(entry))
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads Linux's /proc")
@pytest.mark.parametrize("cache", ["none", "decoded"])
def test_ctrl_c_while_loading_leaves_nothing_behind(tmp_path, cache):
    data, run = photos(tmp_path / "data", 600), tmp_path / "run"
    (tmp_path / "tmp").mkdir()
    shared = set(os.listdir("/dev/shm"))
    more = (
        f"--batch.size 16 --batch.span 16 --train.epochs 10000 --train.eval_epochs 10000 --plan.cache {cache}".split()
    )
    arguments = ["finetune", "--data.path", str(data), *TINY, *more, "--run", str(run)]
    process = start(*arguments, TMPDIR=str(tmp_path / "tmp"))
    deadline = time.monotonic() + TIMEOUT_S
    while '"train"' not in text(run / "metrics.jsonl") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - asked < 15
    assert process.returncode == 130, errors[-2000:]
    assert errors.splitlines()[-1] == "podscale: interrupted; the same command goes on from the last checkpoint"
    assert "Traceback" not in errors
    assert not session(process.pid)
    assert not os.listdir(tmp_path / "tmp")
    assert set(os.listdir("/dev/shm")) <= shared
    assert not [path for path in run.rglob("*") if "tmp" in path.name]


def text(path):
    return path.read_text() if path.exists() else ""


def test_a_picture_that_breaks_in_the_middle_is_one_sentence(tmp_path):
    data, run = photos(tmp_path / "data", 64), tmp_path / "run"
    (tmp_path / "tmp").mkdir()
    broken = data / "train" / "dogs" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:-500])
    more = "--batch.size 16 --batch.span 16 --train.epochs 4 --plan.steps_per_call 1".split()
    arguments = ["finetune", "--data.path", str(data), *TINY, *more, "--run", str(run)]
    process = start(*arguments, TMPDIR=str(tmp_path / "tmp"))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith(f"podscale: cannot read {broken}: ")
    assert "Traceback" not in errors
    assert not session(process.pid)
    assert not os.listdir(tmp_path / "tmp")


@pytest.mark.processes(2)
def test_when_one_process_cannot_go_on_none_is_left_waiting(tmp_path):
    """A broken picture that only one of two processes reads."""
    data = tmp_path / "data"
    for split in ("train", "val"):
        for name in ("cats", "dogs"):
            (data / split / name).mkdir(parents=True)
            for i in range(16):
                pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3), np.uint8)
                Image.fromarray(pixels).save(data / split / name / f"{i}.jpg")
    broken = data / "train" / "dogs" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:-120])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = "--model.name resnet8 --model.stem small --model.width 8 --data.image_size 16 --train.epochs 4".split()
    settings += f"--batch.size 16 --batch.span 16 --coordinator 127.0.0.1:{port} --processes 2".split()
    arguments = ["finetune", "--data.path", str(data), *settings, "--run", str(tmp_path / "run")]
    processes = [start(*arguments, "--process", str(i)) for i in range(2)]
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert all(process.returncode for process in processes)
    assert any(process.returncode == 2 for process in processes)
    assert any("3.jpg" in errors for _, errors in outputs)


def test_a_launcher_that_gives_no_peers_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "podscale", "train"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "OMPI_COMM_WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("podscale: Open MPI does not tell where its first process is")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("logit", [np.nan, np.inf])
def test_a_diverged_model_is_right_about_nothing(logit):
    tally = step._tally(jnp.full((4, 10), logit), jnp.array([0, 1, 2, -1]))
    assert (int(tally.examples), int(tally.correct), int(tally.correct_top5)) == (3, 0, 0)


def test_ties_go_to_the_lower_class_in_top_1_and_top_5():
    tally = step._tally(jnp.zeros((3, 10)), jnp.array([0, 4, 5]))
    assert (int(tally.correct), int(tally.correct_top5)) == (1, 2)
