"""A run's folder: one recipe for ever, files written completely or not at all, a journal that survives a kill."""

import io
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from podscale.errors import UserError
from podscale.recipe import load_recipe, override_recipe
from podscale.report import counter
from podscale.runs import environment, ledger
from podscale.runs.folder import Run
from podscale.runs.journal import Journal
from podscale.runs.ledger import PhaseTimer
from podscale.storage.files import write_atomically

CLASSES = ("cat", "dog")


@pytest.fixture
def recipe():
    return load_recipe("digits")


@pytest.fixture
def run(tmp_path, recipe):
    return Run.create(tmp_path / "run", recipe, {"steps": 3}, CLASSES)


def read_contents(folder):
    """Return content and time of writing of every file below a folder."""
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def get_refusal(function, *arguments):
    with pytest.raises(UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- folders -------------------------------------------------------------------------------------------------------


def test_a_run_survives_writing_and_reading(run, recipe):
    again = Run.load(run.folder)
    assert again == run
    assert again.recipe.name == "digits"
    assert again.classes() == CLASSES
    assert (again.metrics(), again.summary()) == ([], {})
    assert json.loads((run.folder / "plan.json").read_text()) == {"steps": 3}
    assert sorted(os.listdir(run.folder)) == ["classes.json", "plan.json", "recipe.toml"]


def test_each_recipe_has_its_own_folder(recipe):
    other = override_recipe(recipe, {"train.seed": 1})
    assert Run.default_folder(recipe) == Path("runs") / f"digits-{recipe.digest()}" != Run.default_folder(other)


def test_the_same_recipe_resumes_in_its_folder(run, recipe):
    assert Run.create(run.folder, recipe, {"steps": 4}, CLASSES) == run
    assert json.loads((run.folder / "plan.json").read_text()) == {"steps": 4}


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"train.seed": 1}, "(train.seed 0, now 1)"),
        ({"train.epochs": 2, "batch.span": 32}, "(batch.span 64, now 32; train.epochs 30.0, now 2.0)"),
        (
            {"data.lanes": 1, "model.width": 8, "batch.span": 32, "train.seed": 1, "train.epochs": 2},
            "(data.lanes 2, now 1; model.width 16, now 8; batch.span 64, now 32; and 2 more)",
        ),
    ],
)
def test_another_recipe_is_refused_and_nothing_is_written(run, recipe, changes, differences):
    before = read_contents(run.folder)
    for attempt in (Run.check, lambda folder, other: Run.create(folder, other, {}, CLASSES)):
        message = get_refusal(attempt, run.folder, override_recipe(recipe, changes))
        assert str(run.folder) in message
        assert differences in message
    assert read_contents(run.folder) == before


def test_a_folder_with_other_files_is_refused_and_unchanged(tmp_path, recipe):
    (tmp_path / "thesis.tex").write_text("years of work")
    before = read_contents(tmp_path)
    assert "is not empty and holds no run" in get_refusal(Run.create, tmp_path, recipe, {}, CLASSES)
    assert "is a file" in get_refusal(Run.create, tmp_path / "thesis.tex", recipe, {}, CLASSES)
    assert "thesis.tex" in get_refusal(Run.create, tmp_path / "thesis.tex" / "run", recipe, {}, CLASSES)
    assert read_contents(tmp_path) == before


def test_an_empty_or_missing_folder_is_accepted(tmp_path, recipe):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "a" / "b"):
        assert Run.create(folder, recipe, {}, CLASSES).recipe == recipe


def test_a_refusal_names_a_folder_without_a_run(tmp_path):
    assert str(tmp_path) in get_refusal(Run.load, tmp_path)
    assert "nowhere" in get_refusal(Run.load, tmp_path / "nowhere")
    assert str(tmp_path) in get_refusal(Run.load_newest, tmp_path)


@pytest.mark.parametrize("content", [b"x = ", b"\xff\xfe"])
def test_a_refusal_names_a_run_with_a_broken_recipe(run, recipe, content):
    (run.folder / "recipe.toml").write_bytes(content)
    before = read_contents(run.folder)
    assert str(run.folder) in get_refusal(Run.load, run.folder)
    assert str(run.folder) in get_refusal(Run.check, run.folder, recipe)
    assert read_contents(run.folder) == before


def test_the_newest_run_is_the_one_resumed_last(tmp_path, recipe):
    for number in range(3):
        Run.create(tmp_path / str(number), override_recipe(recipe, {"train.seed": number}), {}, CLASSES)
        os.utime(tmp_path / str(number) / "recipe.toml", (1000 + number, 1000 + number))
    assert Run.load_newest(tmp_path).recipe.train.seed == 2
    Run.create(tmp_path / "0", recipe, {}, CLASSES)  # resumed now
    assert Run.load_newest(tmp_path).recipe.train.seed == 0


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_run_killed_while_its_folder_is_made_can_start_again(tmp_path, recipe, monkeypatch, written):
    files = []

    def kill(path, text):
        if len(files) == written:
            path.with_name(path.name + ".part").write_text(text[:3])
            raise KeyboardInterrupt
        files.append(path)
        write_atomically(path, text)

    with monkeypatch.context() as patched:
        patched.setattr("podscale.runs.folder.write_atomically", kill)
        with pytest.raises(KeyboardInterrupt):
            Run.create(tmp_path / "run", recipe, {}, CLASSES)
    assert Run.create(tmp_path / "run", recipe, {}, CLASSES).classes() == CLASSES


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def fail(source, target):
        assert Path(source).read_text() == "new"  # it is complete before it gets the name
        assert path.read_text() == "old"
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["summary.json"]


# --- the journal ---------------------------------------------------------------------------------------------------


def write_journal(folder, start, steps):
    journal = Journal(folder, start)
    for step in steps:
        journal.write("train", step, loss=1 / step, note="text")
    journal.close()


def read_steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_journal_has_one_line_per_step(run):
    write_journal(run.folder, 0, range(1, 4))
    assert [m["step"] for m in run.metrics()] == [1, 2, 3]
    assert run.metrics()[1] == {"event": "train", "step": 2, "loss": 0.5, "note": "text"}


def test_a_resumed_journal_drops_lines_after_its_step(run):
    write_journal(run.folder, 0, range(1, 8))
    write_journal(run.folder, 5, range(6, 9))
    assert read_steps(run.folder) == [1, 2, 3, 4, 5, 6, 7, 8]
    write_journal(run.folder, 0, [1])
    assert read_steps(run.folder) == [1]


@pytest.mark.parametrize("half", ['{"event": "train", "step": 5, "lo', '{"event": "eval", "step": 4}', "{", "\x00\x00"])
def test_an_incomplete_last_line_is_dropped(run, half):
    write_journal(run.folder, 0, range(1, 5))
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(half)
    assert [m["step"] for m in run.metrics() if m["event"] == "train"] == [1, 2, 3, 4]  # readers may see it first
    write_journal(run.folder, 4, [5])
    assert read_steps(run.folder) == [1, 2, 3, 4, 5]


def test_lines_are_on_disk_as_soon_as_they_are_written(run):
    journal = Journal(run.folder, 0)
    journal.write("train", 1, loss=1.0)
    assert read_steps(run.folder) == [1]
    journal.close()


# --- the timer -----------------------------------------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch):
    """A function that lets so many seconds pass on the timer's clock."""
    now_s = [7.0]

    def pass_seconds(seconds):
        now_s[0] += seconds

    monkeypatch.setattr(ledger, "time", SimpleNamespace(**vars(time) | {"perf_counter": lambda: now_s[0]}))
    return pass_seconds


def test_phases_sum_to_the_wall_time(work):
    timer = PhaseTimer()
    for phase in ("train", "evaluate", "train"):
        with timer.measure(phase):
            work(1)
    work(4)
    assert timer.get_phases() == {"train": 2, "evaluate": 1, "other": 4}


def test_time_is_counted_even_if_the_work_fails():
    timer = PhaseTimer()
    with pytest.raises(ValueError, match="broken"), timer.measure("train"):
        raise ValueError("broken")
    assert timer.get_phases()["train"] > 0


def test_a_phase_inside_another_is_counted_once_and_before_the_outer_one_ends(work):
    timer = PhaseTimer()
    with timer.measure("train"):
        work(1)
        with timer.measure("check"):
            work(4)
        work(2)
        assert timer.get_phases() == {"train": 3, "check": 4, "other": 0}
    assert timer.seconds["check"] == 4


# --- the scan of a data set ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_a_scan_reports_its_progress(terminal, monkeypatch):
    monkeypatch.setattr(counter, "LINE_INTERVAL_S", 0)
    shown = io.StringIO()
    with counter.show_progress(Console(file=shown, force_terminal=terminal, width=100), "indexing") as report:
        assert "indexing" not in shown.getvalue()
        report("images", 1200, 5000)
    assert ("1200/5000" if terminal else "indexing images: 1,200 of 5,000\n") in shown.getvalue()


def test_a_library_that_is_only_on_the_path_has_no_version(monkeypatch):
    monkeypatch.setattr(environment, "LIBRARIES", ("numpy", "a-package-that-nobody-installed"))
    versions = environment.list_library_versions()
    assert versions["a-package-that-nobody-installed"] == "not installed"
    assert versions["numpy"] == np.__version__


@pytest.mark.parametrize("name", ["metrics.jsonl", "lock", "recipe.toml", "plan.json", "summary.json", "ledger.json"])
def test_a_pipe_in_the_place_of_a_file_of_a_run_is_refused(run, recipe, name):
    """To open one would wait for ever."""
    (run.folder / name).unlink(missing_ok=True)
    os.mkfifo(run.folder / name)
    with pytest.raises(UserError, match=rf"{name} is a named pipe, not a file of a run; remove it$"):
        Run.check(run.folder, recipe)
