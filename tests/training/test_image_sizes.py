"""Progressive image size: one program for each size, changed at the same steps on every pod, and resumed anywhere."""

import itertools
import threading

import jax
import numpy as np
import pytest
from rich.console import Console
from training.test_invariants import make_small_recipe

from podscale import pod as pods
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.forecast.compute import count_work
from podscale.pod import Pod
from podscale.recipe import Recipe, find_train_size, list_size_ranges, load_recipe
from podscale.runs.folder import Run
from podscale.training import compilation, loop
from podscale.training.restore import load_trained
from podscale.training.setup import plan_recipe, prepare

SIZES = {"data.train_sizes": [8, 10, 12], "data.size_epochs": [64 * 1.5 / 1437, 64 * 4.5 / 1437]}
ONE_SIZE = {"data.train_sizes": [], "data.size_epochs": []}


def make_recipe(steps=7, **changes):
    return make_small_recipe(**{"train.epochs": (steps - 0.5) * 64 / 1437} | SIZES | changes)


def test_steps_and_calls_end_where_sizes_change():
    recipe = make_recipe()
    ranges = [(steps, size) for steps, size in list_size_ranges(recipe, 1437)]
    assert ranges == [(range(2), 8), (range(2, 5), 10), (range(5, 7), 12)]
    plan = plan_recipe(recipe, Pod("cpu", 2, 2), Options(steps_per_call=4))
    assert plan.calls() == [range(2), range(2, 4), range(4, 5), range(5, 7)]
    assert [find_train_size(recipe, step, 1437) for step in (0, 1, 2, 4, 5, 6, 99)] == [8, 8, 10, 10, 12, 12, 12]
    assert "8, 10, 12 px in training, 8 px in evaluation" in dict(plan.rows())["model"]


def test_older_recipes_keep_their_digest_and_one_size():
    recipe = load_recipe("digits")
    assert recipe.override(ONE_SIZE).digest() == recipe.digest()
    assert recipe.override({"data.train_sizes": [6, 8], "data.size_epochs": [1]}).digest() != recipe.digest()
    assert [size for _, size in list_size_ranges(recipe, 1437)] == [8]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data.train_sizes": [8, 9]}, r"data\.size_epochs needs one number less than data\.train_sizes, which has 2"),
        ({"data.size_epochs": [3]}, r"data\.size_epochs needs one number less"),
        ({"data.train_sizes": [8, 9], "data.size_epochs": [10]}, r"must rise between 0 and train\.epochs 10\.0"),
        ({"data.train_sizes": [8, 9, 10], "data.size_epochs": [2, 2]}, r"must rise between 0 and"),
        ({"data.train_sizes": [0]}, r"data\.train_sizes must be at least 1, not 0"),
    ],
)
def test_schedules_without_sense_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Recipe().override(changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model.name": "vit_tiny"}, r"vit_tiny has positions for 32 px"),
        ({"model.name": "convnext_tiny"}, r"data\.train_sizes 48: .* a multiple of 32"),
    ],
)
def test_sizes_that_the_model_cannot_take_are_refused(changes, sentence):
    sizes = {"data.image_size": 32, "data.train_sizes": [32, 48], "data.size_epochs": [1], "model.width": 64}
    with pytest.raises(UserError, match=sentence):
        plan_recipe(make_small_recipe(**changes | sizes | {"train.epochs": 2}), Pod("cpu", 1, 1), Options())


def test_memory_holds_the_largest_size_and_the_forecast_counts_the_average():
    pod, recipe = Pod("cpu", 1, 1), make_recipe()
    recipes = [make_recipe(**ONE_SIZE | {"data.image_size": size}) for size in (8, 10, 12)]
    assert plan_recipe(recipe, pod, Options()).memory == plan_recipe(recipes[-1], pod, Options()).memory
    shares = np.diff([0, *recipe.data.size_epochs, recipe.train.epochs]) / recipe.train.epochs
    flops = [count_work(one, 10).flops for one in recipes]
    assert count_work(recipe, 10).flops == pytest.approx(shares @ flops)


def test_images_on_the_devices_are_refused():
    with pytest.raises(UserError, match=r"plan\.cache device: data\.train_sizes needs the host"):
        prepare(make_recipe(**{"augment.crop": "padded"}), pods.make_pod(jax.devices(), "1x1"), Options(cache="device"))


@pytest.mark.slow
def test_a_run_stopped_between_sizes_resumes_to_the_same_bits(tmp_path):
    pod, quiet = pods.make_pod(jax.devices(), "1x2"), Console(quiet=True)
    recipe = make_recipe(**{"train.eval_epochs": 64 * 3 / 1437})  # evaluated and saved after steps 3 and 6
    whole = loop.train(recipe, pod=pod, folder=tmp_path / "whole", console=quiet)
    assert whole["steps"] == 7

    def stop_early(event):
        return event.kind == "eval"

    halted = loop.train(recipe, pod=pod, folder=tmp_path / "halted", console=quiet, callbacks=[stop_early])
    assert halted["steps"] == 3
    loop.train(recipe, pod=pod, folder=tmp_path / "halted", console=quiet)
    first, second = (load_trained(Run.load(tmp_path / name), "newest") for name in ("whole", "halted"))
    assert first.step == second.step == 7
    assert jax.tree.all(jax.tree.map(np.array_equal, first.params, second.params))


@pytest.mark.heavy
def test_the_programs_of_all_sizes_are_compiled_at_the_same_time(monkeypatch):
    """Each compilation starts to compile once the others have got as far, which they would never in one thread."""
    program = prepare(make_recipe(), pods.make_pod(jax.devices(), "1x1"))
    together, compile_program = threading.Barrier(3, timeout=120), compilation.compile_program

    def compile_with_the_others(*arguments):
        together.wait()
        return compile_program(*arguments)

    monkeypatch.setattr(compilation, "compile_program", compile_with_the_others)
    assert sorted(compilation.compile_train_step(program).programs) == [8, 10, 12]


@pytest.mark.heavy
def test_a_size_that_cannot_be_compiled_is_reported_once_the_others_are_compiled(monkeypatch):
    program = prepare(make_recipe(), pods.make_pod(jax.devices(), "1x1"))
    numbers, has_failed, programs = itertools.count(), threading.Event(), []
    compile_program = compilation.compile_program

    def compile_one_that_fails(*arguments):
        if next(numbers) == 0:
            has_failed.set()
            raise MemoryError("too large")
        assert has_failed.wait(120)
        programs.append(compile_program(*arguments))

    monkeypatch.setattr(compilation, "compile_program", compile_one_that_fails)
    with pytest.raises(MemoryError, match="too large"):
        compilation.compile_train_step(program)
    assert len(programs) == 2
