"""Consecutive non-finite updates: the run rolls back, skips batches, and ends if that does not help."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from podscale import plan, pod
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.config.stop_condition import StopCondition
from podscale.data.order import Order, map_steps_to_batches
from podscale.errors import DivergedError, UserError
from podscale.runs.folder import Run
from podscale.training import compilation, divergence, loop
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.setup import load_train_batches, prepare

QUIET = Console(quiet=True)
DIVERGED, TIMEOUT_S = 65, 240
M = 4  # consecutive non-finite updates


@pytest.fixture(scope="module")
def recipe():
    """45 updates, saved after 12, 23, 34 and 45."""
    changes = {"model.width": 8, "train.epochs": 4, "train.eval_epochs": 1, "train.bad_updates": M}
    return recipes.override_recipe(recipes.load_recipe("digits"), changes)


def identify_batch(images):
    return int(np.asarray(images).astype(np.int64).sum())


def poison_batches(monkeypatch, recipe, *numbers):
    """Make all parameters NaN as soon as one of these batches is trained on, whatever its step."""
    setup = prepare(recipe, pod.make_pod(jax.devices()[:1], "1x1"))
    with load_train_batches(setup, [range(n, n + 1) for n in numbers]) as batches:
        poisoned_batches = {identify_batch(batch.images) for batch in batches}
    compile_train_step = compilation.compile_train_step

    def compile_poisoned(setup, run, **others):
        call = compile_train_step(setup, run, **others)

        def call_with_nan(state, images, labels, count):
            if identify_batch(images) in poisoned_batches:
                state = state._replace(params=jax.tree.map(lambda a: a * jnp.nan, state.params))
            return call(state, images, labels, count)

        return call_with_nan

    monkeypatch.setattr(loop, "compile_train_step", compile_poisoned)


def train(recipe, folder, shape="1x1", console=QUIET, **more):
    return loop.train(recipe, pod=pod.make_pod(jax.devices(), shape), folder=folder, console=console, **more)


def read_losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["1x1", "2x2"])
def test_a_run_rolls_back_and_skips_the_batches_before_the_divergence(recipe, shape, tmp_path, monkeypatch, capsys):
    expected_run, rolled_back_run = tmp_path / "known", tmp_path / "other"
    train(recipe, expected_run, shape, until=StopCondition("accuracy", 0.0))  # up to step 12
    shutil.copytree(expected_run, rolled_back_run)
    (expected_run / divergence.SKIPPED_BATCHES).write_text(json.dumps({"batches": [[21, 28]]}))
    train(recipe, expected_run, shape)
    poison_batches(monkeypatch, recipe, 25)
    summary = train(recipe, rolled_back_run, shape, console=Console(width=300))
    output = capsys.readouterr().out
    assert (
        "non-finite for 4 updates in a row after step 25; rolling back to step 12, and skipping batches 21 to 28"
        in output
    )
    assert "resuming after step 12" in output
    assert [path.name for path in (rolled_back_run / divergence.UNDONE).iterdir()] == ["23"]
    assert divergence.read_skipped_batches(rolled_back_run) == [range(21, 29)]
    assert summary["steps"] == 45
    assert None not in read_losses(rolled_back_run)
    assert read_losses(rolled_back_run) == read_losses(expected_run)
    assert summary["run_seconds"]["lost work"] > 0


def test_the_second_divergence_ends_the_run_with_a_bundle_to_repeat_it(recipe, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    poison_batches(monkeypatch, recipe, 3, 30)
    with pytest.raises(DivergedError, match=r"in a row after step 23, again after a rollback; .*/diverged has the"):
        train(recipe, folder)
    # The first divergence was at step 3: batches are skipped from the first one on.
    assert divergence.read_skipped_batches(folder) == [range(0, 7)]
    batches = json.loads((folder / "diverged" / "batches.json").read_text())
    assert [(entry["step"], entry["batch"]) for entry in batches] == [(step, step + 7) for step in range(19, 27)]
    order = Order(1437, recipe.data.lanes, recipe.batch.size, recipe.train.seed)
    assert [entry["samples"] for entry in batches] == [
        order.get_samples(n, np.arange(128))[0].tolist() for n in range(26, 34)
    ]
    statistics = json.loads((folder / "diverged" / "statistics.json").read_text())
    assert [line["skipped"] for line in statistics["updates"][-5:]] == [0, 1, 1, 1, 1]
    assert statistics["updates"][-1]["loss"] is None
    assert all(entry["no_numbers"] == np.prod(entry["shape"]) for entry in statistics["params"].values())
    assert all(entry["no_numbers"] == 0 for entry in statistics["stats"].values())
    assert recipes.load_recipe(str(folder / "diverged" / "recipe.toml")).digest() == recipe.digest()

    shutil.copytree(folder, tmp_path / "again")
    with pytest.raises(DivergedError):
        train(recipe, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "diverged" / "batches.json").read_text()) == batches


class Killed(BaseException):
    """In the place of a signal that ends the process."""


def test_a_run_killed_while_it_rolls_back_to_its_start_does_so_again(recipe, tmp_path, monkeypatch):
    """There is no checkpoint left then, on purpose: it is not taken for a run that has lost them."""
    folder = tmp_path / "run"
    moves = Checkpoints.move_aside

    def move_and_die(*arguments):
        moves(*arguments)
        raise Killed

    changed = recipes.override_recipe(recipe, {"train.bad_updates": 10})
    poison_batches(monkeypatch, changed, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "move_aside", move_and_die)
        with pytest.raises(Killed):
            train(changed, folder)
    assert os.listdir(folder / "undone") == ["12"]
    summary = train(changed, folder)
    assert summary["steps"] == 45
    assert divergence.read_skipped_batches(folder) == [range(13)]
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.read_about(45)["left_out"] == {"batches": [[0, 12]]}
    (folder / divergence.SKIPPED_BATCHES).unlink()  # as after a loss of power
    with pytest.raises(
        UserError, match=r"left-out.json does not list the batches that the run's checkpoint of step 45"
    ):
        train(changed, folder)


def test_a_list_of_skipped_batches_that_is_damaged_or_lost_is_named(tmp_path):
    path = tmp_path / divergence.SKIPPED_BATCHES
    assert divergence.read_skipped_batches(tmp_path) == []
    facts = {"left_out": divergence.describe_skipped_batches([range(3, 7)])}
    for earlier in (None, {}, {"input": "x"}):
        divergence.check_skipped_batches(tmp_path, 12, earlier)
    with pytest.raises(UserError, match=r"left-out.json does not list .* step 12 skips; .* begin with \[\[3, 6\]\]"):
        divergence.check_skipped_batches(tmp_path, 12, facts)
    path.write_text(json.dumps(divergence.describe_skipped_batches([range(3, 7), range(20, 28)])))
    divergence.check_skipped_batches(tmp_path, 12, facts)
    for text in ("", "{", "[]", "{}", '{"batches": 3}', '{"batches": [3]}'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"left-out.json is damaged: it must list the batches"):
            divergence.read_skipped_batches(tmp_path)


def run_podscale(command, **more):
    command_line = [sys.executable, "-m", *shlex.split(command)]
    return subprocess.run(command_line, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, **more)


@pytest.mark.slow
def test_a_recipe_that_always_diverges_ends_with_its_exit_code_and_one_sentence(tmp_path):
    """No injection: the learning rate is far too high. The bundle's own command repeats it in another folder."""
    peak = "--schedule.peak 1e25 --schedule.warmup_epochs 0 --optimizer.name sgd --train.bad_updates 3"
    process = run_podscale(
        f"podscale train digits --model.width 8 --pod.virtual 1x2 {peak} --run {tmp_path / 'run'} --json"
    )
    assert process.returncode == DIVERGED, process.stderr[-2000:]
    assert "again after a rollback" in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr
    assert not process.stdout
    how = (tmp_path / "run" / "diverged" / "README.txt").read_text().splitlines()
    copy, command = (line.strip() for line in how if line.startswith("    "))
    subprocess.run(shlex.split(copy), cwd=tmp_path, check=True)
    shutil.rmtree(tmp_path / "again" / "diverged")
    again = run_podscale(f"{command} --pod.virtual 1x2", cwd=tmp_path)
    assert again.returncode == DIVERGED, again.stderr[-2000:]
    first, second = (json.loads((tmp_path / run / "diverged" / "batches.json").read_text()) for run in ("run", "again"))
    assert first == second


def test_steps_take_every_batch_but_the_skipped_ones():
    batches = map_steps_to_batches(np.arange(20), [range(12, 15), range(3, 6)])
    assert batches.tolist() == [n for n in range(26) if n not in (3, 4, 5, 12, 13, 14)]


@pytest.mark.parametrize(("save_steps", "bad_updates"), [(1, 10), (3, 10), (7, 10), (0, 10), (0, 1), (2, 1)])
def test_a_checkpoint_to_roll_back_to_is_always_kept(recipe, save_steps, bad_updates):
    """At whatever step the limit is reached, a checkpoint is kept from before the first non-finite update."""
    changed = recipes.override_recipe(recipe, {"train.bad_updates": bad_updates})
    short_plan = plan.make_plan(
        changed, pod.Pod("cpu", 1, 1), plan.Counts(1437, 360, 10), Options(save_steps=save_steps, keep=1)
    )
    points = sorted({0, *short_plan.save_points()})
    for step in range(bad_updates, short_plan.steps + 1):
        newest = [point for point in points if point <= step][-divergence.count_checkpoints_to_keep(short_plan) :]
        assert newest[0] <= max(step - 2 * bad_updates, 0)


@pytest.mark.slow
def test_the_count_of_nonfinite_updates_continues_after_a_stop(recipe, tmp_path, monkeypatch):
    """A run that is stopped between non-finite updates is saved there; when resumed, it ends in the same way."""
    poison_batches(monkeypatch, recipe, 25)
    train(recipe, tmp_path / "whole")
    steps = iter(range(100))

    class StopAfterCalls(loop.StopRequest):
        def is_requested(self, call):
            return next(steps) == 26

    monkeypatch.setattr(loop, "StopRequest", StopAfterCalls)
    with pytest.raises(loop.PreemptedError):
        train(recipe, tmp_path / "stopped")
    assert [m["skipped"] for m in Run.load(tmp_path / "stopped").metrics() if m["event"] == "train"][-2:] == [1, 1]
    train(recipe, tmp_path / "stopped")
    assert (
        divergence.read_skipped_batches(tmp_path / "stopped")
        == divergence.read_skipped_batches(tmp_path / "whole")
        == [range(21, 29)]
    )
    assert read_losses(tmp_path / "stopped") == read_losses(tmp_path / "whole")
