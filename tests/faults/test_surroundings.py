"""What surrounds a process: its clock, time zone, locale, memory limit, and names of folders that are not UTF-8."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.shifted_clock import COMPILER, YEAR_S, shift_clock

SETTINGS = "train digits --model.width 4 --train.epochs 2 --train.eval_epochs 1 --pod.virtual 1x1 --json --run".split()
MEMORY = Path("/sys/fs/cgroup/memory")


def train(folder, *more, **environment):
    command = [sys.executable, "-m", "podscale", *SETTINGS, os.fsencode(folder), *more]
    return subprocess.run(
        command,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        check=False,
        timeout=600,
    )


def read_losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"]


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("usual") / "run"
    assert train(folder).returncode == 0
    return read_losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"TZ": "Pacific/Kiritimati"},
        {"TZ": ":nowhere/at/all"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "tr_TR.UTF-8", "LANG": "xx_YY"},
    ],
    ids=["far east", "no time zone", "ASCII", "no locale"],
)
def test_time_zones_and_locales_change_nothing(tmp_path, losses, environment):
    done = train(tmp_path / "run", **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert read_losses(tmp_path / "run") == losses


@pytest.mark.slow
def test_a_run_folder_whose_name_is_not_utf_8_is_refused_by_a_sentence(tmp_path):
    done = train(tmp_path / os.fsdecode(b"r\xff\xe4n"))
    assert done.returncode == 2, done.stderr[-2000:]
    assert b"has unprintable characters; choose another with --run" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler and Linux")
def test_a_clock_that_jumps_forwards_and_runs_fast_changes_nothing(tmp_path, losses):
    """The time of day starts a year ahead and runs 50 times as fast; monotonic clocks stay."""
    done = train(tmp_path / "run", **shift_clock(YEAR_S, rate=50))
    assert done.returncode == 0, done.stderr[-2000:]
    assert read_losses(tmp_path / "run") == losses
    assert 0 <= json.loads((tmp_path / "run" / "summary.json").read_text())["goodput"] <= 1


@pytest.mark.slow
@pytest.mark.skipif(
    not (MEMORY / "memory.limit_in_bytes").exists() or not os.access(MEMORY, os.W_OK),
    reason="needs root and a memory controller of cgroups, version 1",
)
def test_a_process_that_the_kernel_kills_for_its_memory_is_resumed(tmp_path, losses):
    group = MEMORY / f"podscale-{os.getpid()}"
    group.mkdir()
    try:
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        command = [*enter, sys.executable, "-m", "podscale", *SETTINGS, str(tmp_path / "run")]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        (group / "memory.limit_in_bytes").write_text(str(120 << 20))
        killed = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=600)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
        (group / "memory.limit_in_bytes").write_text(str(8 << 30))
        done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
    finally:
        group.rmdir()
    assert read_losses(tmp_path / "run") == losses
    shutil.rmtree(tmp_path / "run")
