"""A program that cannot continue ends quickly, with one sentence, its own exit code, and no process left waiting."""

import os
import re
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


# A shell in the background makes its children ignore Ctrl-C; the program under test must handle it.
DEFAULT_SIGINT = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)


def start(*arguments, **variables):
    command = [sys.executable, "-c", DEFAULT_SIGINT, sys.executable, "-m", "podscale", "train", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"} | variables
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def test_ctrl_c_while_compiling_ends_with_its_exit_code(tmp_path):
    process = start("digits", "--run", str(tmp_path / "run"))
    deadline = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "run" / "sample.png").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # the sample is the last file written before compilation
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert errors.splitlines()[-1] in (
        "podscale: interrupted; there is no checkpoint yet, so the same command starts again",
        "podscale: interrupted; no step was completed in this session; the same command starts again",
        "podscale: stopped; no step was completed in this session; the same command starts again",
    )
    assert "Traceback" not in errors


DROPPED_INTERRUPT = """
import gc, signal, sys, time
from podscale.cli import main as cli

def interrupt_once(phase, _):
    if phase == "stop" and not interrupted:
        interrupted.append(True)
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)  # here Python raises, and drops the exception

cli._forward_interrupts()
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupted = []
gc.callbacks.append(interrupt_once)
try:
    gc.collect()
    time.sleep(20)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.slow
def test_ctrl_c_during_garbage_collection_is_handled():
    process = subprocess.run(
        [sys.executable, "-c", DROPPED_INTERRUPT], capture_output=True, text=True, check=False, timeout=60
    )
    assert (process.returncode, process.stderr) == (130, "")


MODELS = str(Path(__file__).parents[1] / "support" / "register_small_models.py")
TINY = ["--import", MODELS, *"--model.name small_resnet --model.stem small".split()]
TINY += "--model.width 8 --data.image_size 16".split()


def write_photos(root, side, count=16):
    """Write a folder of large images: training on them spends most of its time loading."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    for split in ("train", "val"):
        for name in ("cats", "dogs"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(pixels).save(root / split / name / f"{i}.jpg")
    return root


def list_session_processes(leader):
    """Return the processes of the session that a process leads, without itself."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # it may just have ended
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and int(entry) != leader:
                    members.append(int(entry))
    return members


def list_shared_memory(processes):
    """Return the files of shared memory that any of the processes has mapped."""
    maps = "".join(Path(f"/proc/{process}/maps").read_text() for process in processes)
    return set(re.findall(r"/dev/shm/\S+", maps))


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads Linux's /proc")
@pytest.mark.parametrize("cache", ["none", "decoded"])
def test_ctrl_c_while_loading_leaves_nothing_behind(tmp_path, cache):
    data, run = write_photos(tmp_path / "data", 600), tmp_path / "run"
    (tmp_path / "tmp").mkdir()
    more = (
        f"--batch.size 16 --batch.span 16 --train.epochs 10000 --train.eval_epochs 10000 --plan.cache {cache}".split()
    )
    arguments = ["imagefolder", "--data.path", str(data), *TINY, *more, "--run", str(run)]
    process = start(*arguments, TMPDIR=str(tmp_path / "tmp"))
    deadline = time.monotonic() + TIMEOUT_S
    while '"train"' not in read_text(run / "metrics.jsonl") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    shared = list_shared_memory([process.pid, *list_session_processes(process.pid)])
    process.send_signal(signal.SIGINT)
    interrupted_at = time.monotonic()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - interrupted_at < 15
    assert process.returncode == 130, errors[-2000:]
    *_, announcement, ending = errors.splitlines()
    assert announcement == "podscale: stopping: this step will be saved; press Ctrl-C again to end at once"
    (saved,) = re.findall(r"^podscale: interrupted; step (\d+) is saved, and the same command resumes", ending)
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name.isdecimal()] == [saved]
    assert "Traceback" not in errors
    assert not list_session_processes(process.pid)
    assert not os.listdir(tmp_path / "tmp")
    assert not [path for path in shared if os.path.exists(path)]
    assert not [path for path in run.rglob("*") if "tmp" in path.name]


def read_text(path):
    return path.read_text() if path.exists() else ""


def test_a_truncated_image_is_reported_in_one_sentence(tmp_path):
    data, run = write_photos(tmp_path / "data", 64), tmp_path / "run"
    (tmp_path / "tmp").mkdir()
    broken = data / "train" / "dogs" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:-500])
    more = "--batch.size 16 --batch.span 16 --train.epochs 4 --plan.steps_per_call 1 --data.bad_share 0".split()
    arguments = ["imagefolder", "--data.path", str(data), *TINY, *more, "--run", str(run)]
    process = start(*arguments, TMPDIR=str(tmp_path / "tmp"))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith(f"podscale: cannot read {broken}: ")
    assert "Traceback" not in errors
    assert not list_session_processes(process.pid)
    assert not os.listdir(tmp_path / "tmp")


@pytest.mark.processes(2)
def test_when_one_process_fails_no_other_waits_forever(tmp_path):
    """A broken image that only one of two processes reads."""
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
    settings = [*TINY, *"--train.epochs 4 --data.bad_share 0".split()]
    settings += f"--batch.size 16 --batch.span 16 --coordinator 127.0.0.1:{port} --processes 2".split()
    arguments = ["imagefolder", "--data.path", str(data), *settings, "--run", str(tmp_path / "run")]
    processes = [start(*arguments, "--process", str(i)) for i in range(2)]
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert all(process.returncode for process in processes)
    assert any(process.returncode == 2 for process in processes)
    assert any("3.jpg" in errors for _, errors in outputs)


def test_a_launcher_without_a_coordinator_is_reported_in_one_sentence():
    process = subprocess.run(
        [sys.executable, "-m", "podscale", "train"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "OMPI_COMM_WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 2
    assert process.stderr.startswith("podscale: Open MPI does not say where its first process is")
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("logit", [np.nan, np.inf])
def test_a_diverged_model_is_right_about_nothing(logit):
    counts = step._count_correct(jnp.full((4, 10), logit), jnp.array([0, 1, 2, -1]))
    assert (int(counts.examples), int(counts.correct), int(counts.correct_top5)) == (3, 0, 0)


def test_ties_go_to_the_lower_class_in_top_1_and_top_5():
    counts = step._count_correct(jnp.zeros((3, 10)), jnp.array([0, 4, 5]))
    assert (int(counts.correct), int(counts.correct_top5)) == (1, 2)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    """The first asks for a checkpoint after a step that takes much longer than the test."""
    program = (
        "import os, signal, threading, time\n"
        "from podscale.training.preemption import StopRequest\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with StopRequest(7) as stop:\n"
        "    stop.is_requested(0)\n"
        "    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    while not stop.is_requested(1): time.sleep(0.01)\n"
        "    print('asked', flush=True); time.sleep(600)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert (process.returncode, process.stdout) == (130, "asked\n")
    first, second = process.stderr.splitlines()[-2:]
    assert first == "podscale: stopping: this step will be saved; press Ctrl-C again to end at once"
    assert second == "podscale: ended at once; the same command resumes from the last checkpoint, if there is one"


def test_ctrl_c_during_the_first_imports_is_one_sentence():
    program = (
        "import sys\n"
        "from podscale.__main__ import run\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'podscale.recipe': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "run()\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "podscale: interrupted\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_a_process_whose_main_thread_is_busy_in_native_code_before_the_first_step(number, code):
    """One long call without a Python instruction in between, as compilation is."""
    program = (
        "import os, sys, threading\n"
        "import ctypes\n"
        "from podscale.training.preemption import StopRequest\n"
        "with StopRequest(7):\n"
        f"    threading.Timer(0.2, os.kill, (os.getpid(), {int(number)})).start()\n"
        "    libc = ctypes.CDLL(None); mutex = (ctypes.c_char * 128)()\n"
        "    libc.pthread_mutex_lock(mutex); libc.pthread_mutex_lock(mutex)\n"  # waits for itself, forever
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert process.returncode == code
    expected = "podscale: stopped; no step was completed in this session; the same command resumes after step 7"
    assert process.stderr.splitlines()[-1] == expected
