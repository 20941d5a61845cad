"""The loop as users call it: train, stop, resume, aim for a target, train a model of their own."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from podscale import pod
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.config.stop_condition import StopCondition
from podscale.errors import UserError
from podscale.runs.folder import Run
from podscale.training import loop
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.setup import prepare

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def recipe():
    return recipes.override_recipe(
        recipes.load_recipe("digits"),
        {"model.width": 8, "train.epochs": 4, "train.eval_epochs": 1, "optimizer.average": 0.9, "augment.erase": 0.3},
    )


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    """A run without interruption, on a 2x2 torus."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    summary = loop.train(recipe, pod=make_torus(), folder=folder, console=QUIET)
    return folder, summary


def make_torus(shape="2x2"):
    return pod.make_pod(jax.devices(), shape)


def read_state(folder, shape="2x2"):
    """Return the state in the newest checkpoint."""
    setup = prepare(Run.load(folder).recipe, make_torus(shape))
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        return jax.device_get(checkpoints.restore(checkpoints.newest(), setup.init_state()))


def read_losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


def assert_identical(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.heavy
def test_a_run_learns_and_writes_its_folder(undisturbed, recipe):
    folder, summary = undisturbed
    names = {path.name for path in folder.iterdir()}
    assert {"recipe.toml", "plan.json", "classes.json", "metrics.jsonl", "checkpoints", "summary.json"} <= names
    lines = Run.load(folder).metrics()
    assert [m["step"] for m in lines if m["event"] == "train"] == list(range(1, summary["steps"] + 1))
    evals = [m for m in lines if m["event"] == "eval"]
    assert [m["step"] for m in evals] == [12, 23, 34, 45]
    assert all(m["examples"] == 360 for m in evals)
    assert evals[-1]["accuracy"] == summary["accuracy"]
    assert np.mean([m["loss"] for m in lines if m["event"] == "train"][-5:]) < 2.2
    parts = summary["seconds"]
    assert {"start", "compile", "train", "input wait", "evaluate", "checkpoint", "other"} <= set(parts)
    assert summary["train_s"] + summary["compile_s"] <= sum(parts.values())


@pytest.mark.heavy
def test_tensorboard_shows_the_same_curve(undisturbed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = undisturbed
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    expected = [(m["step"], m["loss"]) for m in Run.load(folder).metrics() if m["event"] == "train"]
    scalars = [(e.step, e.value) for e in events.Scalars("train/loss")]
    np.testing.assert_allclose(scalars, expected, rtol=1e-6)


@pytest.mark.heavy
def test_a_resumed_run_is_bit_identical(undisturbed, recipe, tmp_path):
    stopped = loop.train(recipe, pod=make_torus(), folder=tmp_path, until=StopCondition("accuracy", 0.0), console=QUIET)
    assert (stopped["steps"], stopped["reached"]) == (12, True)
    loop.train(recipe, pod=make_torus(), folder=tmp_path, console=QUIET)
    assert_identical(read_state(tmp_path), read_state(undisturbed[0]))
    assert read_losses(tmp_path) == read_losses(undisturbed[0])


@pytest.mark.heavy
@pytest.mark.slow
def test_another_pod_resumes_a_run(undisturbed, recipe, tmp_path):
    loop.train(recipe, pod=make_torus("2x4"), folder=tmp_path, until=StopCondition("accuracy", 0.0), console=QUIET)
    summary = loop.train(
        recipe, pod=make_torus("1x2"), folder=tmp_path, console=QUIET, options=Options(summation="ring")
    )
    assert summary["steps"] == undisturbed[1]["steps"]
    np.testing.assert_allclose(read_losses(tmp_path), read_losses(undisturbed[0]), rtol=2e-3)


@pytest.mark.heavy
def test_a_finished_run_is_not_trained_again(undisturbed, recipe):
    before = (undisturbed[0] / "metrics.jsonl").read_bytes()
    again = loop.train(recipe, pod=make_torus(), folder=undisturbed[0], console=QUIET)
    assert again["accuracy"] == undisturbed[1]["accuracy"]
    assert (undisturbed[0] / "metrics.jsonl").read_bytes() == before


@pytest.mark.heavy
def test_a_checkpoint_of_another_model_is_refused_by_the_first_array_that_differs(undisturbed, recipe):
    wider = prepare(recipes.override_recipe(recipe, {"model.width": 16}), make_torus()).init_state()
    with (
        Checkpoints(undisturbed[0] / "checkpoints", read_only=True) as checkpoints,
        pytest.raises(UserError, match=r"params/layers/0/conv/kernel has shape \(3, 3, 3, 8\), wanted \(3, 3, 3, 16\)"),
    ):
        checkpoints.restore(checkpoints.newest(), wider)


@pytest.mark.heavy
def test_a_run_does_not_resume_on_other_data(undisturbed, recipe):
    plan = json.loads((undisturbed[0] / "plan.json").read_text())
    with pytest.raises(UserError, match=r"other data \(train 1437, now 1400\)"):
        Run.create(undisturbed[0], recipe, plan | {"counts": plan["counts"] | {"train": 1400}}, tuple("0123456789"))
    with pytest.raises(UserError, match="other classes"):
        Run.create(undisturbed[0], recipe, plan, tuple("abcdefghij"))


@pytest.mark.heavy
def test_the_path_of_the_data_may_change(undisturbed, recipe):
    moved = recipes.override_recipe(recipe, {"data.path": "elsewhere"})
    again = loop.train(moved, pod=make_torus(), folder=undisturbed[0], console=QUIET)
    assert again["steps"] == undisturbed[1]["steps"]


@pytest.mark.heavy
def test_a_target_that_was_already_reached_needs_no_training(recipe, tmp_path):
    for _ in range(2):
        summary = loop.train(
            recipe, pod=make_torus(), folder=tmp_path, until=StopCondition("accuracy", 0.0), console=QUIET
        )
        assert (summary["steps"], summary["reached"]) == (12, True)


@pytest.mark.heavy
def test_the_newest_and_the_best_checkpoints_are_kept(undisturbed):
    folder, _ = undisturbed
    scores = {m["step"]: m["accuracy"] for m in Run.load(folder).metrics() if m["event"] == "eval"}
    best = max(scores, key=lambda step: scores[step])
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        assert set(checkpoints.steps()) == {23, 34, 45, best}  # as far back as a run may have to roll back
        assert scores[checkpoints.best()] == scores[best]
        assert checkpoints.newest() == 45


@pytest.mark.slow
def test_resume_after_sigkill_is_bit_identical(tmp_path):
    """A real process, a real SIGKILL after the second checkpoint, the same command again."""
    settings = "--model.width 8 --train.epochs 6 --train.eval_epochs 1 --pod.virtual 1x2"
    command = [sys.executable, "-m", "podscale", "train", "digits", *settings.split(), "--json", "--run"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    killed = subprocess.Popen([*command, str(tmp_path / "killed")], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "checkpoints" / "23").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    for name in ("killed", "whole"):
        done = subprocess.run([*command, str(tmp_path / name)], env=environment, stdout=subprocess.PIPE, check=True)
        assert json.loads(done.stdout)["steps"] == 68
    assert_identical(read_state(tmp_path / "killed", "1x2"), read_state(tmp_path / "whole", "1x2"))


@pytest.mark.heavy
def test_a_target_that_is_never_reached_is_reported(recipe, tmp_path):
    summary = loop.train(
        recipe, pod=make_torus(), folder=tmp_path, until=StopCondition.parse("accuracy=1.0"), console=QUIET
    )
    assert (summary["reached"], summary["reached_s"]) == (False, None)


@pytest.mark.heavy
def test_a_target_counts_time_with_and_without_compilation(recipe, tmp_path):
    summary = loop.train(recipe, pod=make_torus(), folder=tmp_path, until=StopCondition.parse("top5=0"), console=QUIET)
    assert 0 < summary["reached_s"] < summary["reached_with_compile_s"]
    assert summary["reached_with_compile_s"] == pytest.approx(summary["reached_s"] + summary["compile_s"])


@pytest.mark.parametrize("text", ["accuracy", "loss=1", "accuracy=high", ""])
def test_an_invalid_target_is_refused(text):
    with pytest.raises(UserError, match="--until takes"):
        StopCondition.parse(text)


class OwnModel(nnx.Module):
    """A user's model, made of flax's layers."""

    def __init__(self, classes, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, classes, rngs=rngs)

    def __call__(self, images):
        return self.head(nnx.relu(self.norm(self.conv(images))).mean((1, 2)))


@pytest.mark.heavy
def test_a_users_model_trains_the_same_on_any_pod(recipe, tmp_path):
    short = recipes.override_recipe(recipe, {"train.epochs": 1, "augment.erase": 0.0})
    curves = []
    for shape in ("1x1", "2x2"):
        model = OwnModel(10, nnx.Rngs(0))
        loop.train(short, pod=make_torus(shape), model=model, folder=tmp_path / shape, console=QUIET)
        curves.append(read_losses(tmp_path / shape))
    np.testing.assert_allclose(*curves, rtol=1e-4)
    assert len(curves[0]) == 12


class CountingModel(OwnModel):
    def __init__(self, classes, rngs):
        super().__init__(classes, rngs)
        self.calls = nnx.Variable(0)


def test_a_model_with_other_state_is_refused(recipe, tmp_path):
    with pytest.raises(UserError, match="keeps state other than parameters"):
        loop.train(recipe, pod=make_torus("1x1"), model=CountingModel(10, nnx.Rngs(0)), folder=tmp_path, console=QUIET)
    assert not list(tmp_path.iterdir())
