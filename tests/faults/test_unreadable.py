"""Checkpoints that cannot be read for a while, are lost, or are not what their name says: nothing is thrown away."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from support.short_run import STEPS, make_recipe, train

from podscale import recipe as recipes
from podscale.errors import UserError
from podscale.runs.folder import Run
from podscale.training import session
from podscale.training.checkpoint import files as checkpoint_files
from podscale.training.checkpoint import format as checkpoint_format
from podscale.training.checkpoint.checkpoints import Checkpoints, DamagedCheckpointError
from podscale.training.checkpoint.files import UnreadableCheckpointError

UNREADABLE_FILE = "/proc/self/mem"  # its first byte cannot be read: EIO


@pytest.fixture(autouse=True)
def sleeps(monkeypatch):
    """Waits between attempts to read, which take no time here; a test may set `during` to what happens meanwhile."""
    waits = SimpleNamespace(seconds=[], during=lambda: None)

    def sleep(seconds):
        waits.seconds.append(seconds)
        waits.during()

    monkeypatch.setattr(checkpoint_files, "time", SimpleNamespace(sleep=sleep))
    return waits


def make_state(seed):
    return {"w": jax.random.normal(jax.random.key(seed), (100, 300)), "n": jnp.int32(seed)}


@pytest.fixture
def checkpoint_folder(tmp_path):
    """Checkpoints 1, 2 and 3 of a small state."""
    with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), accuracy=step / 10)
    return tmp_path / "checkpoints"


def restore(folder, step):
    with Checkpoints(folder, read_only=True) as checkpoints:
        return checkpoints.restore(step, make_state(0))


def make_unreadable(path):
    """Put a file that gives input/output errors in the place of a file; return a function that undoes it."""
    kept = path.with_name("kept")
    path.rename(kept)
    path.symlink_to(UNREADABLE_FILE)
    return lambda: kept.replace(path) if kept.exists() else None


def list_files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


FILES = ("manifest.json", "arrays-0.bin")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_no_damage(checkpoint_folder, sleeps, name):
    make_unreadable(checkpoint_folder / "3" / name)
    with pytest.raises(UnreadableCheckpointError, match=rf"^cannot read .*3/{name}: Input/output error, also after 15"):
        restore(checkpoint_folder, 3)
    assert sleeps.seconds == list(checkpoint_files.RETRY_DELAYS_S)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_for_a_moment_is_read_again(checkpoint_folder, sleeps, name):
    sleeps.during = make_unreadable(checkpoint_folder / "3" / name)
    np.testing.assert_array_equal(restore(checkpoint_folder, 3)["w"], make_state(3)["w"])
    assert len(sleeps.seconds) == 1


def test_a_folder_with_a_file_that_cannot_be_read_is_opened_for_training_only_once_it_can(checkpoint_folder):
    """Here everything used to be moved to `damaged/`."""
    undo = make_unreadable(checkpoint_folder / "3" / "manifest.json")
    with pytest.raises(UserError, match="Input/output error"):
        Checkpoints(checkpoint_folder)
    assert not checkpoint_folder.with_name("damaged").exists()
    undo()
    with Checkpoints(checkpoint_folder) as checkpoints:
        assert checkpoints.steps() == [1, 2, 3]


def test_a_list_of_checkpoints_that_cannot_be_read_for_a_moment_is_read_again(checkpoint_folder, sleeps, monkeypatch):
    list_steps, failures = checkpoint_files.list_steps, [OSError(errno.EIO, "Input/output error")]

    def fail_first(folder):
        if failures:
            raise failures.pop()
        return list_steps(folder)

    monkeypatch.setattr(checkpoint_files, "list_steps", fail_first)
    with Checkpoints(checkpoint_folder) as checkpoints:
        assert checkpoints.steps() == [1, 2, 3]
    assert len(sleeps.seconds) == 1


def test_a_checkpoint_of_a_newer_version_is_refused_and_not_moved(checkpoint_folder):
    path = checkpoint_folder / "3" / "manifest.json"
    content = json.loads(path.read_text()) | {"format": 2}
    del content["sha256"]
    path.write_text(json.dumps(content | {"sha256": checkpoint_format._digest(content)}))
    before = list_files(checkpoint_folder)
    with pytest.raises(UserError, match="the checkpoint of step 3 has the format 2, which this version"):
        Checkpoints(checkpoint_folder)
    assert list_files(checkpoint_folder) == before


def test_what_lies_in_damaged_is_never_replaced(checkpoint_folder):
    with Checkpoints(checkpoint_folder) as checkpoints:
        moved = checkpoints.move_aside(3)
        shutil.copytree(checkpoint_folder / "2", checkpoint_folder / "3")
        again = checkpoints.move_aside(3)
    assert [moved, again] == [checkpoint_folder.with_name("damaged") / name for name in ("3", "3-2")]
    assert moved.is_dir()
    assert again.is_dir()


def test_a_checkpoint_that_was_copied_under_another_step_is_refused(checkpoint_folder):
    shutil.copytree(checkpoint_folder / "1", checkpoint_folder / "9")
    with pytest.raises(DamagedCheckpointError, match=r"checkpoints/9 is damaged: it was saved after step 1, not after"):
        restore(checkpoint_folder, 9)


# --- training ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(short_run):
    """A run with two checkpoints."""
    assert sorted(int(path.name) for path in (short_run / "checkpoints").iterdir()) == list(STEPS)
    return short_run


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def read_losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


def test_a_run_whose_checkpoints_cannot_be_read_ends_and_moves_nothing(run, trained, capsys):
    undo = [make_unreadable(run / "checkpoints" / str(step) / "arrays-0.bin") for step in STEPS]
    with pytest.raises(UserError, match="it may still be whole, so nothing was moved; make it readable"):
        train(run)
    assert not (run / "damaged").exists()
    for work in undo:
        work()
    assert list_files(run / "checkpoints") == list_files(trained / "checkpoints")
    train(run, console=Console(width=300))
    assert "resuming after step 23" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["missing", "empty", "dangling"])
def test_a_run_whose_checkpoints_are_gone_starts_at_0_only_if_allowed(run, trained, how, capsys):
    """As with a disk that is not mounted: no folder, an empty one, a link to nowhere."""
    (run / "checkpoints").rename(run / "elsewhere")
    if how == "empty":
        (run / "checkpoints").mkdir()
    elif how == "dangling":
        (run / "checkpoints").symlink_to(run / "nowhere")
    with pytest.raises(UserError, match=r"had a checkpoint of step 23, but in .*--from-scratch as well to start again"):
        train(run)
    assert len(read_losses(run)) == 23  # as before
    if how == "missing":
        train(run, console=Console(width=300), from_scratch=True)
        assert "resuming" not in capsys.readouterr().out
        assert read_losses(run) == read_losses(trained)


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(checkpoint_folder, sleeps):
    checkpoint_folder.rename(checkpoint_folder.with_name("elsewhere"))
    checkpoint_folder.symlink_to(checkpoint_folder)
    with pytest.raises(UnreadableCheckpointError, match=r"checkpoints: Too many levels of symbolic links, also after"):
        checkpoint_files.find_steps(checkpoint_folder)
    assert sleeps.seconds == list(checkpoint_files.RETRY_DELAYS_S)


def test_a_run_finds_its_checkpoints_once_their_disk_is_back(run, sleeps, capsys):
    (run / "checkpoints").rename(run / "elsewhere")
    sleeps.during = lambda: (run / "elsewhere").rename(run / "checkpoints")
    train(run, console=Console(width=300))
    assert "resuming after step 23" in capsys.readouterr().out
    assert len(sleeps.seconds) == 1


def flip_bits(folder):
    path = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def test_a_run_whose_checkpoints_are_all_damaged_starts_at_0_only_if_allowed(run, trained):
    for step in STEPS:
        flip_bits(run / "checkpoints" / str(step))
    with pytest.raises(UserError, match=r"none is intact, and the damaged ones are in .*damaged; bring one back"):
        train(run)
    with pytest.raises(UserError, match="--from-scratch"):
        train(run)
    assert sorted(os.listdir(run / "damaged")) == ["12", "23"]
    train(run, from_scratch=True)
    assert read_losses(run) == read_losses(trained)
    assert sorted(os.listdir(run / "damaged")) == ["12", "23"]


def test_a_checkpoint_with_broken_metadata_is_named_when_it_is_moved(run, trained, capsys):
    (run / "checkpoints" / "23" / "manifest.json").write_bytes(bytes(100))
    shutil.copytree(run / "checkpoints" / "12", run / "checkpoints" / "20")
    train(run, console=Console(width=300))
    output = capsys.readouterr().out
    aside = run / "damaged"
    assert f"checkpoint 23 is damaged (its metadata is not valid JSON); it was moved to {aside / '23'}" in output
    assert (
        f"checkpoint 20 is damaged (it was saved after step 12, not after step 20); it was moved to {aside / '20'}"
        in output
    )
    assert "resuming after step 12" in output
    assert read_losses(run) == read_losses(trained)


def test_a_checkpoint_that_only_another_process_finds_damaged_is_moved_with_that_reason(monkeypatch, capsys):
    steps = [5]
    checkpoints = SimpleNamespace(
        moved={}, newest=lambda: max(steps, default=None), move_aside=lambda step: steps.remove(step) or "damaged/5"
    )
    checkpoints.check_nothing_lost = checkpoints.forget = checkpoints.restore = lambda *_: None
    program = SimpleNamespace(restore_state=lambda _: "state", init_state=lambda: "initial state")
    monkeypatch.setattr(session.group, "all_agree", lambda agrees: False)
    console, settings = Console(width=300), session.Settings()
    assert session.resume(program, checkpoints, console, settings, initialized=True) == ("initial state", 0)
    words = "checkpoint 5 is damaged (another process does not read what was saved); it was moved to damaged/5"
    assert words in capsys.readouterr().out


def test_a_run_with_more_steps_than_the_recipe_returns_its_summary(run, capsys):
    shorter = recipes.override_recipe(make_recipe(), {"train.epochs": 1})
    summary = train(run, recipe=shorter, console=Console(width=300), allow_changed=["recipe"])
    assert summary["steps"] == 23
    assert "is already finished: after step 23, and the recipe has 12" in capsys.readouterr().out


def test_a_run_killed_between_its_last_checkpoint_and_its_summary_gets_both(run, trained, capsys):
    for name in ("summary.json", "report.html"):
        (run / name).unlink()
    summary = train(run, console=Console(width=300))
    assert "is already finished" in capsys.readouterr().out
    expected = Run.load(trained).summary()
    assert [summary[name] for name in ("steps", "accuracy")] == [expected[name] for name in ("steps", "accuracy")]
    assert 0 <= summary["goodput"] <= 1
    assert Run.load(run).summary()["steps"] == summary["steps"]
    assert (run / "report.html").stat().st_size > 10_000
    assert read_losses(run) == read_losses(trained)


def test_a_summary_of_an_earlier_end_is_replaced_after_a_kill_before_the_last_one(run, trained):
    """As of a recipe with fewer epochs, or of a training that stopped at its target."""
    expected = Run.load(trained).summary()
    (run / "summary.json").write_text(json.dumps(expected | {"steps": 12, "accuracy": 0.1}))
    summary = train(run)
    assert [summary[name] for name in ("steps", "accuracy")] == [expected[name] for name in ("steps", "accuracy")]
    assert Run.load(run).summary() == summary


def test_a_torn_line_of_the_journal_that_is_not_even_text_is_dropped(run, trained):
    shutil.rmtree(run / "checkpoints" / "23")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "tr\xc3')
    train(run)
    assert read_losses(run) == read_losses(trained)
