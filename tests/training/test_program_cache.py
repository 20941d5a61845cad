"""The cache of compiled programs: whole files only, bounded, private, and used by every process of a run."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from podscale.training.program_cache import AUTOTUNE_FOLDER, ProgramCache, share_compilation

MODELS = Path(__file__).parents[1] / "support" / "register_small_models.py"


def list_files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_program_is_stored_whole_and_a_damaged_one_is_replaced(tmp_path):
    cache = ProgramCache(tmp_path)
    cache.put("jit_f-1", b"one")
    (tmp_path / "jit_f-1-cache").write_bytes(b"o")  # JAX finds it damaged, compiles, and stores it again
    cache.put("jit_f-1", b"one")
    assert cache.get("jit_f-1") == b"one"
    assert list_files(tmp_path) == ["jit_f-1-cache"]


def test_a_program_that_cannot_be_read_or_written_is_compiled_again(tmp_path):
    (tmp_path / "file").touch()
    cache = ProgramCache(tmp_path / "file" / "programs")  # what would be its folder is a file
    cache.put("jit_f-1", b"one")
    assert cache.get("jit_f-1") is None


def test_programs_that_were_not_used_for_longest_are_removed(tmp_path):
    cache = ProgramCache(tmp_path)
    for number in range(4):
        cache.put(f"jit_f-{number}", bytes(100))
        os.utime(tmp_path / f"jit_f-{number}-cache", (number, number))
    (tmp_path / "jit_g-0-cache.17.3.part").write_bytes(bytes(100))  # left by a process that was killed
    os.utime(tmp_path / "jit_g-0-cache.17.3.part", (0, 0))
    assert cache.get("jit_f-0") is not None  # which uses it
    ProgramCache(tmp_path, max_bytes=250)
    assert list_files(tmp_path) == ["jit_f-0-cache", "jit_f-3-cache"]


def test_what_xla_has_tried_counts_and_is_removed_too(tmp_path):
    tried = tmp_path / AUTOTUNE_FOLDER
    tried.mkdir()
    for number in range(2):
        (tried / f"{number}.textproto").write_bytes(bytes(100))
        os.utime(tried / f"{number}.textproto", (2 * number, 2 * number))
    (tmp_path / "jit_f-0-cache").write_bytes(bytes(100))
    os.utime(tmp_path / "jit_f-0-cache", (1, 1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_bytes(bytes(100))
    ProgramCache(tmp_path, max_bytes=250)
    assert list_files(tmp_path) == ["jit_f-0-cache", "mine", AUTOTUNE_FOLDER]
    assert list_files(tried) == ["1.textproto"]
    ProgramCache(tmp_path, max_bytes=150)
    assert (list_files(tmp_path), list_files(tried)) == (["mine", AUTOTUNE_FOLDER], ["1.textproto"])
    assert list_files(tmp_path / "mine") == ["file"]


class Waiter:
    """A thread that looks for a program as another process does; it waits while this one compiles it."""

    def __init__(self, folder):
        self.results, self.is_waiting, self.has_reason_to_end = [], threading.Event(), threading.Event()
        self._folder, self._thread = folder, threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            with share_compilation(self._check):
                self.results.append(ProgramCache(self._folder).get("jit_f-1"))
        except InterruptedError as error:
            self.results.append(str(error))

    def _check(self):
        self.is_waiting.set()
        if self.has_reason_to_end.is_set():
            raise InterruptedError("a process is lost")

    def get(self):
        self._thread.join(60)
        return self.results


def check_nothing():
    pass


@pytest.mark.parametrize("program", [b"one", None])
def test_a_process_waits_for_the_program_that_another_one_compiles(tmp_path, program):
    cache = ProgramCache(tmp_path)
    with share_compilation(check_nothing):
        assert cache.get("jit_f-1") is None  # this one compiles it
        waiter = Waiter(tmp_path)
        assert waiter.is_waiting.wait(60)
        assert waiter.results == []
        if program:
            cache.put("jit_f-1", program)
    assert waiter.get() == [program]  # where the first one has failed, the other one compiles it
    assert list_files(tmp_path) == (["jit_f-1-cache"] if program else [])


def test_a_process_that_waits_for_a_program_can_leave(tmp_path):
    with share_compilation(check_nothing):
        assert ProgramCache(tmp_path).get("jit_f-1") is None
        waiter = Waiter(tmp_path)
        waiter.has_reason_to_end.set()
        assert waiter.get() == ["a process is lost"]


CLAIM = """
import sys
from podscale.training.program_cache import ProgramCache, share_compilation

with share_compilation(lambda: None):
    print(ProgramCache(sys.argv[1]).get("jit_f-1"), flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_nobody_waits_for_a_process_that_was_killed_as_it_compiled(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", CLAIM, str(tmp_path)], text=True, **pipes) as process:
        assert process.stdout.readline() == "None\n"
        waiter = Waiter(tmp_path)
        assert waiter.is_waiting.wait(60)
        process.kill()
    assert waiter.get() == [None]


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.processes(2)])])
def test_a_second_start_compiles_nothing_in_any_process(tmp_path, processes):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    settings = f"train digits --import {MODELS} --model.name small_resnet --model.width 4 --train.epochs 0.2".split()
    settings += "--json --pod.virtual 1x2 --run".split()
    launch = ["launch", "-n", str(processes)] if processes > 1 else []
    programs, counts = tmp_path / "cache" / "podscale" / "programs", []
    for run in ("first", "second"):
        command = [sys.executable, "-m", "podscale", *launch, *settings, str(tmp_path / run)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        counts.append(len(list_files(programs)))
    assert counts[0] == counts[1] > 10
    steps = [name for name in list_files(programs) if name.startswith("jit_call-")]
    assert len(steps) == 2  # of training and of evaluation, the same in all processes
    assert stat.S_IMODE(programs.stat().st_mode) == 0o700
    first, second = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("first", "second"))
    assert first["accuracy"] == second["accuracy"]
    parts = second["start_seconds"]
    assert list(parts) == ["interpreter", "imports", "join", "devices", "index", "model", "folder"]
    assert sum(parts.values()) == pytest.approx(second["seconds"]["start"], abs=0.2)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "command",
    [
        "eval --run {run} --pod.virtual 1x1",
        pytest.param("predict {run}/sample.png --run {run}", marks=pytest.mark.slow),
        pytest.param("export {run} --to {to}/w.safetensors", marks=pytest.mark.slow),
        pytest.param("bench step digits --images 8 --repeats 1 --pod.virtual 1x1", marks=pytest.mark.slow),
        pytest.param("bench sum digits --bytes 1000 --repeats 1 --pod.virtual 1x2", marks=pytest.mark.slow),
    ],
)
def test_commands_that_use_a_model_keep_their_programs(tmp_path, short_run, command):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = command.format(run=short_run, to=tmp_path).split()
    done = subprocess.run(
        [sys.executable, "-m", "podscale", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(name.endswith("-cache") for name in list_files(tmp_path / "cache" / "podscale" / "programs"))
