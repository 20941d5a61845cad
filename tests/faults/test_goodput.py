"""The ledger of a run that is stopped, killed and resumed: every second counts once."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from podscale.runs.ledger import DOWN, LOST, History

SETTINGS = "digits --model.width 8 --train.epochs 8 --train.eval_epochs 1 --pod.virtual 1x1 --json".split()


def start_training(folder):
    command = [sys.executable, "-m", "podscale", "train", *SETTINGS, "--run", str(folder)]
    return subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE)


@pytest.mark.slow
def test_the_phases_of_a_killed_run_sum_to_its_wall_time(tmp_path):
    killed, ledger = start_training(tmp_path), tmp_path / "ledger.json"
    deadline = time.monotonic() + 240
    while not (ledger.exists() and '"step": 34' in ledger.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    time.sleep(1)
    output, _ = start_training(tmp_path).communicate(timeout=240)
    summary, ended = json.loads(output), (tmp_path / "summary.json").stat().st_mtime
    (first, second) = json.loads(ledger.read_text())
    wall = ended - first["began"]
    assert sum(summary["run_seconds"].values()) == pytest.approx(wall, rel=0.01)
    assert summary["run_seconds"][DOWN] >= 1
    assert summary["run_seconds"]["train"] > summary["seconds"]["train"]
    assert 0 < summary["goodput"] < 1
    assert [note["step"] for note in second["notes"]][-1] == 90


def test_work_after_the_checkpoint_that_a_run_resumes_from_is_lost(tmp_path):
    first = History(tmp_path, began=0.0, resumed=0)
    first.record(10, {"train": 40.0, "compile": 10.0}, at=50.0)
    first.record(20, {"train": 80.0, "compile": 10.0}, at=90.0)
    second = History(tmp_path, began=100.0, resumed=10)  # the checkpoint of step 20 was damaged
    second.record(30, {"train": 60.0}, at=160.0)
    third = History(tmp_path, began=200.0, resumed=30)
    phases = third.sum_phases({"train": 7.0})
    assert phases == {"train": 40.0 + 60.0 + 7.0, "compile": 10.0, LOST: 40.0, DOWN: 10.0 + 40.0}
    assert sum(phases.values()) == 207.0
    assert third.compute_goodput({"train": 7.0}) == pytest.approx(107 / 207)


BOOT = "6f3c0f2e"  # of one machine, for which it identifies its boot


@pytest.mark.parametrize("jump_s", [-1.7e9, -3600.0, 3600.0, 3e9])
@pytest.mark.parametrize("moment", ["before the checkpoint", "after the checkpoint", "between sessions"])
def test_a_clock_that_is_set_changes_no_sum_on_the_same_boot(tmp_path, jump_s, moment):
    start_s = 1.8e9  # of the session's 100 s, the last 10 s are lost; the machine then does other things for 20 s
    clock = {when: start_s + seconds for when, seconds in (("note", 90.0), ("write", 100.0), ("resume", 120.0))}
    jumped = {"before the checkpoint": 3, "after the checkpoint": 2, "between sessions": 1}[moment]
    clock |= {when: clock[when] + jump_s for when in list(clock)[-jumped:]}
    first = History(tmp_path, start_s, resumed=0, boot=(BOOT, 50.0))
    first.record(10, {"compile": 30.0, "train": 60.0}, at=clock["note"])
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (clock["write"], clock["write"]))
    second = History(tmp_path, clock["resume"], resumed=10, boot=(BOOT, 170.0))
    phases = second.sum_phases({"train": 80.0})
    assert phases[LOST] + phases[DOWN] == pytest.approx(30.0)
    assert min(phases.values()) >= 0
    assert sum(phases.values()) == pytest.approx(200.0)
    assert second.compute_goodput({"train": 80.0}) == pytest.approx(140 / 200)


@pytest.mark.parametrize("jump_s", [-1.7e9, -100.0, 100.0, 3e9])
def test_goodput_stays_between_0_and_1_where_a_clock_is_set_over_a_boot(tmp_path, jump_s):
    first = History(tmp_path, 1.8e9, resumed=0, boot=(BOOT, 50.0))
    first.record(10, {"compile": 30.0, "train": 60.0}, at=1.8e9 + 90)
    second = History(tmp_path, 1.8e9 + 120 + jump_s, resumed=10, boot=("another", 5.0))
    phases = second.sum_phases({"train": 80.0})
    assert min(phases.values()) >= 0
    assert phases["train"] == 140.0
    assert 0 <= second.compute_goodput({"train": 80.0}) <= 140 / 170


def test_a_ledger_without_boots_is_continued(tmp_path):
    """As earlier versions wrote it, also after a clock that was set back."""
    note = {"step": 10, "at": 90.0, "parts": {"train": 60.0, "compile": 30.0}}
    entry = {"began": 1000.0, "resumed": 0, "notes": [note], "ended": 0.0}
    (tmp_path / "ledger.json").write_text(json.dumps([entry]))
    second = History(tmp_path, began=500.0, resumed=10, boot=(BOOT, 5.0))
    assert second.sum_phases({"train": 10.0}) == {"train": 70.0, "compile": 30.0, LOST: 0.0, DOWN: 0.0}
    assert second.compute_goodput({"train": 10.0}) == pytest.approx(0.7)


def test_a_run_that_starts_from_scratch_has_no_past(tmp_path):
    History(tmp_path, began=0.0, resumed=0).record(5, {"train": 3.0}, at=3.0)
    assert History(tmp_path, began=50.0, resumed=0).sum_phases({"train": 1.0}) == {"train": 1.0}


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"began": 1}]', '{"a": 2}'])
def test_an_invalid_ledger_is_ignored(tmp_path, text):
    (tmp_path / "ledger.json").write_text(text)
    assert History(tmp_path, began=5.0, resumed=3).sum_phases({"train": 1.0}) == {"train": 1.0}
