"""A short training of digits for all tests that need some run: of one recipe, so that it is compiled once.

The number of epochs and the width are constants of the compiled program: another one costs seconds of compilation.
"""

import jax
from rich.console import Console

from podscale import pod
from podscale import recipe as recipes
from podscale.training import loop

OPTIONS = "--model.width 4 --train.epochs 2 --train.eval_epochs 1 --pod.virtual 1x1".split()
STEPS = (12, 23)  # of its checkpoints


def make_recipe():
    changes = {"model.width": 4, "train.epochs": 2, "train.eval_epochs": 1}
    return recipes.override_recipe(recipes.load_recipe("digits"), changes)


def train(folder, **more):
    """Train that recipe, or the one that is given, on one device."""
    settings = {"recipe": make_recipe(), "console": Console(quiet=True)} | more
    return loop.train(pod=pod.make_pod(jax.devices()[:1], "1x1"), folder=folder, **settings)
