"""The cache of compiled programs: whole files only, bounded, private, and used by every process of a run."""

import json
import os
import stat
import subprocess
import sys

import pytest

from podscale.training.program_cache import ProgramCache


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


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.processes(2)])])
def test_a_second_start_compiles_nothing_in_any_process(tmp_path, processes):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    settings = "train digits --model.width 4 --train.epochs 0.2 --json --pod.virtual 1x2 --run".split()
    launch = ["launch", "-n", str(processes)] if processes > 1 else []
    programs, counts = tmp_path / "cache" / "podscale" / "programs", []
    for run in ("first", "second"):
        command = [sys.executable, "-m", "podscale", *launch, *settings, str(tmp_path / run)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        counts.append(len(list_files(programs)))
    assert counts[0] == counts[1] > 20
    assert stat.S_IMODE(programs.stat().st_mode) == 0o700
    first, second = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("first", "second"))
    assert first["accuracy"] == second["accuracy"]
    parts = second["start_seconds"]
    assert list(parts) == ["interpreter", "imports", "join", "devices", "index", "model", "folder"]
    assert sum(parts.values()) == pytest.approx(second["seconds"]["start"], abs=0.2)
