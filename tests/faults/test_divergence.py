"""Updates that have no number, again and again: the run goes back, leaves batches out, and ends if that is no help."""

import json
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
from podscale.config.stop_condition import Until
from podscale.data.order import Order, batches_at
from podscale.errors import DivergedError
from podscale.runs.folder import Run
from podscale.training import compilation, divergence, loop, setup

QUIET = Console(quiet=True)
DIVERGED, TIMEOUT_S = 65, 240
M = 4  # updates in a row


@pytest.fixture(scope="module")
def recipe():
    """45 updates, saved after 12, 23, 34 and 45."""
    changes = {"model.width": 8, "train.epochs": 4, "train.eval_epochs": 1, "train.bad_updates": M}
    return recipes.override(recipes.load("digits"), changes)


def key(images):
    return int(np.asarray(images).astype(np.int64).sum())


def poison(monkeypatch, recipe, *numbers):
    """Parameters are no numbers from the moment on that one of these batches is trained on; whatever its step is."""
    job = setup.prepare(recipe, pod.of(jax.devices()[:1], "1x1"))
    with setup.train_batches(job, [range(n, n + 1) for n in numbers]) as batches:
        keys = {key(batch.images) for batch in batches}
    compiled_step = compilation.compile_train_step

    def compiled(job, run):
        call = compiled_step(job, run)

        def poisoned(state, images, labels, count):
            if key(images) in keys:
                state = state._replace(params=jax.tree.map(lambda a: a * jnp.nan, state.params))
            return call(state, images, labels, count)

        return poisoned

    monkeypatch.setattr(loop, "compile_train_step", compiled)


def trained(recipe, folder, shape="1x1", console=QUIET, **more):
    return loop.train(recipe, pod=pod.of(jax.devices(), shape), folder=folder, console=console, **more)


def losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["1x1", "2x2"])
def test_a_run_goes_back_and_leaves_out_the_batches_that_led_there(recipe, shape, tmp_path, monkeypatch, capsys):
    known, other = tmp_path / "known", tmp_path / "other"
    trained(recipe, known, shape, until=Until("accuracy", 0.0))  # up to step 12
    shutil.copytree(known, other)
    (known / divergence.LEFT_OUT).write_text(json.dumps({"batches": [[21, 28]]}))
    trained(recipe, known, shape)
    poison(monkeypatch, recipe, 25)
    summary = trained(recipe, other, shape, console=Console(width=300))
    said = capsys.readouterr().out
    assert (
        "no number for 4 updates in a row after step 25; going back to step 12, and leaving out batches 21 to 28"
        in said
    )
    assert "resuming after step 12" in said
    assert [path.name for path in (other / divergence.UNDONE).iterdir()] == ["23"]
    assert divergence.left_out(other) == [range(21, 29)]
    assert summary["steps"] == 45
    assert None not in losses(other)
    assert losses(other) == losses(known)
    assert summary["run_seconds"]["lost work"] > 0


def test_the_second_time_it_ends_with_all_that_is_needed_to_repeat_it(recipe, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    poison(monkeypatch, recipe, 3, 30)
    with pytest.raises(DivergedError, match=r"in a row after step 23, and not for the first time; .*/diverged has the"):
        trained(recipe, folder)
    assert divergence.left_out(folder) == [range(0, 7)]  # the first time was at step 3: from the very beginning
    batches = json.loads((folder / "diverged" / "batches.json").read_text())
    assert [(one["step"], one["batch"]) for one in batches] == [(step, step + 7) for step in range(19, 27)]
    order = Order(1437, recipe.data.lanes, recipe.batch.size, recipe.train.seed)
    assert [one["samples"] for one in batches] == [order.at(n, np.arange(128))[0].tolist() for n in range(26, 34)]
    found = json.loads((folder / "diverged" / "statistics.json").read_text())
    assert [line["skipped"] for line in found["updates"][-5:]] == [0, 1, 1, 1, 1]
    assert found["updates"][-1]["loss"] is None
    assert all(one["no_numbers"] == np.prod(one["shape"]) for one in found["params"].values())
    assert all(one["no_numbers"] == 0 for one in found["stats"].values())
    assert recipes.load(str(folder / "diverged" / "recipe.toml")).digest() == recipe.digest()

    shutil.copytree(folder, tmp_path / "again")
    with pytest.raises(DivergedError):
        trained(recipe, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "diverged" / "batches.json").read_text()) == batches


def podscale(command, **more):
    words = [sys.executable, "-m", *shlex.split(command)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, **more)


@pytest.mark.slow
def test_a_recipe_that_learns_nothing_but_no_numbers_ends_with_its_code_and_one_sentence(tmp_path):
    """No injection: a learning rate that is far too high. The bundle's own command does it again, elsewhere."""
    peak = "--schedule.peak 1e25 --schedule.warmup_epochs 0 --optimizer.name sgd --train.bad_updates 3"
    done = podscale(f"podscale train digits --model.width 8 --pod.virtual 1x2 {peak} --run {tmp_path / 'run'} --json")
    assert done.returncode == DIVERGED, done.stderr[-2000:]
    assert "and not for the first time" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not done.stdout
    how = (tmp_path / "run" / "diverged" / "README.txt").read_text().splitlines()
    copy, command = (line.strip() for line in how if line.startswith("    "))
    subprocess.run(shlex.split(copy), cwd=tmp_path, check=True)
    shutil.rmtree(tmp_path / "again" / "diverged")
    again = podscale(f"{command} --pod.virtual 1x2", cwd=tmp_path)
    assert again.returncode == DIVERGED, again.stderr[-2000:]
    first, second = (json.loads((tmp_path / run / "diverged" / "batches.json").read_text()) for run in ("run", "again"))
    assert first == second


def test_steps_take_every_batch_but_those_left_out():
    taken = batches_at(np.arange(20), [range(12, 15), range(3, 6)])
    assert taken.tolist() == [n for n in range(26) if n not in (3, 4, 5, 12, 13, 14)]


@pytest.mark.parametrize(("save_steps", "bad_updates"), [(1, 10), (3, 10), (7, 10), (0, 10), (0, 1), (2, 1)])
def test_a_checkpoint_that_is_old_enough_is_always_kept(recipe, save_steps, bad_updates):
    """Whenever the streak becomes full: of those saved up to then, the kept ones reach back to before it."""
    made = recipes.override(recipe, {"train.bad_updates": bad_updates})
    planned = plan.make_plan(
        made, pod.Pod("cpu", 1, 1), plan.Counts(1437, 360, 10), Options(save_steps=save_steps, keep=1)
    )
    points = sorted({0, *planned.save_points()})
    for full in range(bad_updates, planned.steps + 1):
        newest = [point for point in points if point <= full][-divergence.kept(planned) :]
        assert newest[0] <= max(full - 2 * bad_updates, 0)


@pytest.mark.slow
def test_a_streak_goes_on_over_a_stop(recipe, tmp_path, monkeypatch):
    """Asked to stop inside the streak, the run is saved there; who resumes it comes to the same end."""
    poison(monkeypatch, recipe, 25)
    trained(recipe, tmp_path / "whole")
    steps = iter(range(100))

    class Asked(loop.StopRequest):
        def after(self, call):
            return next(steps) == 26

    monkeypatch.setattr(loop, "StopRequest", Asked)
    with pytest.raises(loop.PreemptedError):
        trained(recipe, tmp_path / "stopped")
    assert [m["skipped"] for m in Run.load(tmp_path / "stopped").metrics() if m["event"] == "train"][-2:] == [1, 1]
    trained(recipe, tmp_path / "stopped")
    assert divergence.left_out(tmp_path / "stopped") == divergence.left_out(tmp_path / "whole") == [range(21, 29)]
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
