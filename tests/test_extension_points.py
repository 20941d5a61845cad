"""A summation strategy, a kind of input, an optimizer and a reporter are each added in a few lines."""

from dataclasses import dataclass, replace
from typing import get_args, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rich.console import Console

import podscale
from podscale.optim import optimizers
from podscale.optim.sgd import make_sgd
from podscale.parallel import input_kinds, inputs, strategies
from podscale.parallel.shared_matrices import GROUP_AXES
from podscale.parallel.summation import PAYLOADS, Replicated
from podscale.pod import ALL_AXES
from podscale.recipe import Optimizer

# --- a summation strategy --------------------------------------------------------------------------------------------


def add_summation():
    """Every device gathers what all have, and adds it up."""

    def gather_and_add(x, wire):
        return lax.all_gather(x.astype(wire), ALL_AXES).astype(x.dtype).sum(0)

    strategies.register_summation(Replicated("gathered", gather_and_add))


# --- a kind of input -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GrayInput(inputs.HostFed):
    """The host sends one channel of gray images: a third of the bytes."""

    name: str = "gray"

    def count_bytes(self, recipe, samples):
        return inputs.ImageBytes(recipe.data.image_size**2, 0)

    def describe_batch(self, image_size):
        return (image_size, image_size, 1), np.dtype(np.uint8)

    def load(self, batch):
        images, labels = batch.load_images()
        return images[..., :1], labels

    def get_images(self, batch, residents, image_size):
        return jnp.repeat(batch, 3, axis=-1)


# --- an optimizer ----------------------------------------------------------------------------------------------------


def add_optimizer():
    """SGD without momentum, whatever the recipe says of it."""

    @optimizers.register_optimizer("plain")
    def make_plain(settings, learning_rate):
        return make_sgd(replace(settings, momentum=0.0), learning_rate)


# --- a reporter ------------------------------------------------------------------------------------------------------


class BestLoss:
    """Keeps the least training loss, and stops the run at the first evaluation after it fell below a limit."""

    def __init__(self, limit):
        self.losses, self.limit = [], limit

    def __call__(self, event):
        if event.kind == "train":
            self.losses.append(event.values["loss"])
        return event.kind == "eval" and min(self.losses) < self.limit


# --- all of them -----------------------------------------------------------------------------------------------------


def train(folder, changes, options, limit):
    small = {
        "model.name": "small_resnet",
        "model.width": 4,
        "train.epochs": 1,
        "train.eval_epochs": 0.25,
        "batch.span": 64,
    }
    recipe = podscale.load_recipe("digits").override(small | changes)
    reporter = BestLoss(limit)
    summary = podscale.train(
        recipe,
        pod=podscale.find_pod(virtual="1x2"),
        options=podscale.Options(**options),
        folder=folder,
        callbacks=[reporter],
        console=Console(quiet=True),
    )
    return summary["steps"], reporter.losses


@pytest.mark.heavy
@pytest.mark.usefixtures("registries", "small_models")
def test_added_parts_train_together_to_the_same_losses(tmp_path):
    add_summation()
    input_kinds.register_input(GrayInput())
    add_optimizer()
    added = {"summation": "gathered", "cache": "gray"}
    built_in = {"optimizer.name": "sgd", "optimizer.momentum": 0.0}
    steps, losses = train(tmp_path / "added", {"optimizer.name": "plain"}, added, limit=0.0)
    assert (steps, losses) == train(tmp_path / "built-in", built_in, {"summation": "xla", "cache": "none"}, limit=0.0)
    assert steps == 12
    plan = podscale.Run.load(tmp_path / "added").plan()
    assert (plan["summation"], plan["bytes_per_device"]["input"]) == ("gathered", 64 * 3 * 64)


@pytest.mark.usefixtures("registries")
def test_a_name_is_taken_once_and_a_wrong_one_is_refused_with_the_nearest():
    add_summation()
    with pytest.raises(podscale.UserError, match="already"):
        add_summation()
    recipe, pod = podscale.load_recipe("digits"), podscale.parse_pod("cpu:1x2")
    with pytest.raises(podscale.UserError, match="no gradient summation 'gatherd': did you mean gathered"):
        podscale.make_plan(recipe, pod, podscale.Options(summation="gatherd"))


@pytest.mark.parametrize(
    ("section", "field", "names"),
    [
        (podscale.Options, "summation", {"auto", *strategies.STRATEGIES}),
        (podscale.Options, "payload", set(PAYLOADS)),
        (podscale.Options, "cache", {"auto", "none", "encoded", "decoded", *input_kinds.INPUTS}),
        (podscale.Options, "orthogonalize", {"auto", *GROUP_AXES}),
        (Optimizer, "name", set(optimizers.BUILT_IN_NAMES)),
    ],
)
def test_a_field_has_a_choice_for_each_part_that_is_built_in(section, field, names):
    assert set(get_args(get_type_hints(section)[field])) == names
