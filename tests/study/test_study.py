"""Studies: a file becomes cases, cases become trainings, trainings become means, deviations and a plot."""

import errno
import json
import os
import statistics
import threading
import time
from xml.etree import ElementTree

import jax
import pytest
from rich.console import Console

from podscale import pod as pods
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.storage.lock import FolderLock
from podscale.study import grid, results
from podscale.study import run as run_module

pytestmark = pytest.mark.usefixtures("small_models")  # compiled in half the time of a resnet8

TINY = """# Does it matter?
recipe = "digits"
seeds = [3, 4]

[set]
train.epochs = 1
"model.name" = "small_resnet"
"model.width" = 8

[grid]
batch.size = [64, 128]
"""


@pytest.fixture
def write_study(tmp_path):
    """A function that writes a study's file."""

    def write(text=TINY, name="tiny.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_every_combination_is_a_case(write_study):
    study = grid.load_study(write_study(TINY + 'optimizer.name = ["sgd", "adamw"]\n'))
    assert study.doc == "Does it matter?"
    assert [case.name for case in study.cases] == [
        "batch.size 64, optimizer.name sgd",
        "batch.size 64, optimizer.name adamw",
        "batch.size 128, optimizer.name sgd",
        "batch.size 128, optimizer.name adamw",
    ]
    recipe = study.cases[1].with_seed(4)
    assert (recipe.batch.size, recipe.optimizer.name, recipe.train.epochs) == (64, "adamw", 1)
    assert (recipe.model.width, recipe.train.seed) == (8, 4)


def test_named_cases_are_combined_with_the_grid(write_study):
    cases = '[[case]]\nname = "fast"\nset.schedule.peak = 2.0\n[[case]]\nname = "slow"\nset.schedule.peak = 0.5\n'
    study = grid.load_study(write_study(TINY + cases))
    assert [(case.values["case"], case.recipe.batch.size, case.recipe.schedule.peak) for case in study.cases] == [
        ("fast", 64, 2.0),
        ("fast", 128, 2.0),
        ("slow", 64, 0.5),
        ("slow", 128, 0.5),
    ]


def test_fields_may_differ_at_some_values_of_the_grid(write_study):
    cases = '[[case]]\nname = "fast"\nset.schedule.peak = 2.0\n[[case]]\nname = "slow"\nset.schedule.peak = 0.5\n'
    at = '[[at]]\ncase = "fast"\ngrid.batch.size = 64\nset.schedule.peak = 3.0\n'
    everywhere = "[[at]]\ngrid.batch.size = [128]\nset.train.epochs = 2\n"
    study = grid.load_study(write_study(TINY + cases + at + everywhere))
    finished_study = [(case.name, case.recipe.schedule.peak, case.recipe.train.epochs) for case in study.cases]
    assert finished_study == [
        ("fast, batch.size 64", 3.0, 1),
        ("fast, batch.size 128", 2.0, 2),
        ("slow, batch.size 64", 0.5, 1),
        ("slow, batch.size 128", 0.5, 2),
    ]


def test_the_command_line_overrides_all_but_the_grid(write_study):
    study = grid.load_study(write_study(), {"train.epochs": "2"}, [7])
    assert study.seeds == (7,)
    assert {case.recipe.train.epochs for case in study.cases} == {2}


def test_a_recipe_file_beside_the_study_is_used(write_study):
    write_study("[model]\nwidth = 16\n", "mine.toml")
    assert grid.load_study(write_study('recipe = "mine.toml"\n')).cases[0].recipe.model.width == 16


def test_a_case_may_have_a_recipe_of_its_own(write_study):
    write_study("[model]\nwidth = 16\n[optimizer]\nmomentum = 0.5\n", "mine.toml")
    cases = '[[case]]\nname = "mine"\nrecipe = "mine.toml"\nset.schedule.peak = 3.0\n[[case]]\nname = "digits"\n'
    at = '[[at]]\ncase = "mine"\ngrid.batch.size = 128\nset.schedule.peak = 4.0\n'
    study = grid.load_study(write_study(TINY.replace('"model.width" = 8\n', "") + cases + at))
    recipes = [case.recipe for case in study.cases]
    assert [recipe.name for recipe in recipes] == ["mine", "mine", "digits", "digits"]
    assert [recipe.model.width for recipe in recipes[:3]] == [16, 16, grid.recipes.load_recipe("digits").model.width]
    assert [recipe.schedule.peak for recipe in recipes[:2]] == [3.0, 4.0]
    assert [(recipe.batch.size, recipe.train.epochs) for recipe in recipes] == [(64, 1), (128, 1)] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe = ", "not valid TOML"),
        ("recipes = 3", "a study has no 'recipes'"),
        ("recipe = 3", "a study's recipe is a name or a TOML file, not 3"),
        ('recipe = "digit"', "there is no recipe 'digit'"),
        ('measure = "speed"', "a study's measure cannot be 'speed'"),
        ("seeds = 3", "different whole numbers from 0 on, not 3"),
        ("seeds = []", "different whole numbers from 0 on"),
        ("seeds = [1, 1]", "different whole numbers from 0 on"),
        ("seeds = [true]", "different whole numbers from 0 on"),
        ("set = 3", "set in a study is a table of recipe fields"),
        ("[set]\nbatches.size = 3", "no section of a recipe: did you mean batch"),
        ("[set]\nbatch = 3", "no section of a recipe"),
        ("[set]\nbatch.sice = 3", "did you mean"),
        ("[grid]\nbatch.size = 3", "batch.size in a study's grid is a list of values, not 3"),
        ("[grid]\nbatch.size = []", "is a list of values"),
        ("[grid]\nbatch.size = [100]", "batch.span"),
        ("[grid]\ntrain.seed = [1]", "a study's seeds are in `seeds`"),
        ('case = "x"', "started by [[case]]"),
        ("[[case]]\nset.batch.size = 64", "a case of a study has a `name`"),
        ('[[case]]\nname = "a"\nsize = 3', "and nothing else"),
        ('[[case]]\nname = "a"\nrecipe = "digit"', "there is no recipe 'digit'"),
        ('[[case]]\nname = "a"\nrecipe = 3', "a study's recipe is a name or a TOML file, not 3"),
        ('recipe = "digit"\n[[case]]\nname = "a"\nrecipe = "digits"', "there is no recipe 'digit'"),
        ('[[case]]\nname = "a"\n[[case]]\nname = "a"', "two cases with the name 'a'"),
        ("at = 3", "started by [[at]]"),
        ("[[at]]\nset.train.epochs = 1", "has `grid` and `set`"),
        ("[[at]]\ngrid = 3\nset.train.epochs = 1", "is a table of recipe fields"),
        ("[[at]]\ngrid.batch.size = 64\nset.train.epochs = 1", "batch.size 64, which is not in its grid"),
        (TINY + '[[at]]\ncase = "b"\ngrid.batch.size = 64\nset.train.epochs = 1', "the case 'b', which does not exist"),
        (TINY + "[[at]]\ngrid.batch.size = 64\nset.batch.size = 128", "sets batch.size, which its grid varies"),
        (TINY + "[[at]]\ngrid.batch.size = 64\nset.train.seed = 1", "a study's seeds are in `seeds`"),
        (f"[grid]\nbatch.size = {[64] * 101}\ntrain.epochs = {[1] * 100}", "more than 10,000 cases"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_trained(write_study, text, message):
    with pytest.raises(UserError) as error:
        grid.load_study(write_study(text))
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no study file"):
        grid.load_study(tmp_path / "none.toml")


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory):
    """A study of two cases and two seeds that has finished."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "tiny.toml").write_text(TINY)
    study, pod = grid.load_study(folder / "tiny.toml"), pods.make_pod(jax.devices()[:1], "1x1")
    with (folder / "log").open("w") as log:
        result = run_module.run_study(study, folder / "runs", pod, Options(), Console(file=log))
    return study, pod, folder, result


@pytest.mark.heavy
def test_means_and_deviations_match_the_runs(finished_study):
    study, _, folder, result = finished_study
    assert [case["count"] for case in result["cases"]] == [2, 2]
    for case in result["cases"]:
        ends = [
            json.loads((folder / "runs" / run["run"] / "summary.json").read_text())["accuracy"] for run in case["runs"]
        ]
        assert case["mean"] == pytest.approx(statistics.fmean(ends))
        assert case["deviation"] == pytest.approx(statistics.stdev(ends))
        assert (case["least"], case["most"]) == (min(ends), max(ends))
    assert json.loads((folder / "runs" / "study.json").read_text()) == result
    assert [row[0] for row in results.format_rows(result)] == [case.name for case in study.cases]
    assert results.describe_failures(result) == ""


@pytest.mark.heavy
def test_finished_trainings_are_not_repeated(finished_study):
    study, pod, folder, result = finished_study
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("summary.json")}
    assert len(before) == 4
    with (folder / "second").open("w") as log:
        assert run_module.run_study(study, folder / "runs", pod, Options(), Console(file=log)) == result
    assert (folder / "second").read_text().count("done before") == 4
    assert {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("summary.json")} == before


@pytest.mark.heavy
def test_a_training_claimed_by_another_process_is_left_to_it_and_waited_for(finished_study, monkeypatch):
    study, pod, folder, result = finished_study
    monkeypatch.setattr(run_module, "POLL_S", 0.01)
    recipe = study.cases[0].with_seed(3)
    log, second_results = folder / "third", []

    def run_second():
        with log.open("w", buffering=1) as file:
            second_results.append(run_module.run_study(study, folder / "runs", pod, Options(), Console(file=file)))

    with FolderLock(folder / "runs" / "claims" / f"{recipe.name}-{recipe.digest()}") as lock:
        lock.acquire()
        thread = threading.Thread(target=run_second)
        thread.start()
        wait_until(lambda: log.exists() and "waiting for what other processes train: 1" in log.read_text())
        assert log.read_text().count("done before") == 3
        assert study.cases[0].name + ", seed 3" not in log.read_text()
        assert thread.is_alive()
    thread.join()
    assert second_results == [result]
    assert study.cases[0].name + ", seed 3" in log.read_text()


@pytest.mark.heavy
def test_a_table_that_cannot_be_written_is_reported_in_one_sentence(finished_study, monkeypatch):
    study, pod, folder, _ = finished_study

    def raise_disk_full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_module, "write_atomically", raise_disk_full)
    with (folder / "fourth").open("w") as log, pytest.raises(UserError) as error:
        run_module.run_study(study, folder / "runs", pod, Options(), Console(file=log))
    message = f"cannot write the table in {folder / 'runs'}: No space left on device; the same command continues"
    assert str(error.value) == message


def wait_until(condition, seconds=30):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.heavy
def test_a_stopped_run_does_not_count_as_finished(finished_study, tmp_path):
    study, _, folder, _ = finished_study
    recipe = study.cases[0].with_seed(3)
    run = folder / "runs" / f"{recipe.name}-{recipe.digest()}"
    assert run_module.read_finished_summary(run)["steps"] == 23
    plan = json.loads((run / "plan.json").read_text())
    for name in ("recipe.toml", "summary.json"):
        (tmp_path / name).write_text((run / name).read_text())
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"steps": 24}))
    assert run_module.read_finished_summary(tmp_path) is None
    assert run_module.read_finished_summary(tmp_path / "nothing") is None


@pytest.mark.heavy
def test_the_plot_has_a_point_and_an_error_bar_for_every_case(finished_study):
    study, _, folder, _ = finished_study
    plot = ElementTree.parse(folder / "runs" / "study.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    notes = [note.text for note in plot.iter(f"{space}title")]
    assert [note.partition(":")[0] for note in notes] == [case.name for case in study.cases]
    message = [text.text for text in plot.iter(f"{space}text")]
    assert {"tiny", "accuracy, %", "batch.size", "64", "128"} <= set(message)


@pytest.mark.heavy
def test_a_failed_training_does_not_affect_the_others(write_study, tmp_path):
    text = 'recipe = "digits"\n[set]\ntrain.epochs = 1\nmodel.name = "small_resnet"\nmodel.width = 8\n'
    cases = '[[case]]\nname = "none"\nset.data.source = "npz"\nset.data.path = "no.npz"\n[[case]]\nname = "digits"\n'
    cases += '[[case]]\nname = "diverges"\nset.optimizer.name = "sgd"\nset.schedule.peak = 1e38\n'
    study = grid.load_study(write_study(text + cases))
    with (tmp_path / "log").open("w") as log:
        pod = pods.make_pod(jax.devices()[:1], "1x1")
        result = run_module.run_study(study, tmp_path / "runs", pod, Options(), Console(file=log))
    assert [case["count"] for case in result["cases"]] == [0, 1, 0]
    assert "loss or gradient were non-finite" in result["cases"][2]["runs"][0]["error"]
    assert "2 of the trainings have no result; the first: none, seed 0: data.path no.npz" in results.describe_failures(
        result
    )
    assert results.format_rows(result)[0][1:] == ["-", "-", "-", "-", "0"]
    with (tmp_path / "again").open("w") as log:
        again = run_module.run_study(study, tmp_path / "runs", pod, Options(), Console(file=log, width=1000))
    diverged = tmp_path / "runs" / result["cases"][2]["runs"][0]["run"]
    assert f"diverged before: {diverged}" in (tmp_path / "again").read_text()
    assert again["cases"][2]["runs"][0]["error"] == f"it diverged; {diverged / 'diverged'} says how"


def test_cases_without_numbers_are_drawn_side_by_side(write_study):
    cases = "".join(f'[[case]]\nname = "{name}"\n' for name in "ab")
    study = grid.load_study(write_study('recipe = "digits"\n' + cases))
    runs = {name: {"values": {"case": name}, "runs": [{"seed": 0, "accuracy": 0.5}]} for name in "ab"}
    svg = results.draw_plot(study, results.summarize(study, runs))
    assert all(f">{label}<" in svg for label in ("1", "2", "1: a", "2: b", "case"))


def test_programs_are_cached_in_the_studys_folder_unless_jax_has_a_cache(tmp_path):
    with run_module._cache_programs(tmp_path / "elsewhere"):  # under pytest they are
        jax.jit(lambda x: 3 * x + 1)(2.0)
    assert not (tmp_path / "elsewhere").exists()
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with run_module._cache_programs(tmp_path / "here"):
            jax.jit(lambda x: 3 * x + 2)(2.0)
        assert jax.config.values["jax_compilation_cache_dir"] is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert [file for file in (tmp_path / "here").iterdir() if "lambda" in file.name]
