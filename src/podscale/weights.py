"""Weights: the numbers of a trained network by name, out of a run's checkpoint.

A name is where a number stands in the model, such as `layers.0.conv.kernel`; parameters and running statistics share
one table, since no two of them stand in the same place.
"""

from typing import Any, NamedTuple

import jax
from flax import nnx

from podscale import models, optim
from podscale import step as steps
from podscale.checkpoint import Checkpoints
from podscale.errors import UserError, nearest
from podscale.models.functional import Functional, Tree, functional
from podscale.run import Run


class Trained(NamedTuple):
    """What a checkpoint knows: a network, its numbers (averaged over steps if the recipe has an average), its step."""

    net: Functional
    params: Tree
    stats: Tree
    step: int

    def model(self) -> nnx.Module:
        """The network, ready to be called on normalized images."""
        model: nnx.Module = self.net.model(self.params, self.stats)
        model.eval()
        return model


def of_run(run: Run, which: str = "best", model: nnx.Module | None = None) -> Trained:
    """What the run's checkpoint "best", "newest" or of a step holds; `model` replaces the recipe's own."""
    recipe, classes = run.recipe, len(run.classes())
    model = model or models.build(recipe.model, classes, recipe.data.image_size, recipe.train.seed)
    net, params, stats = functional(model)
    # The schedule's length has no part in the state's structure, which is all that is wanted here.
    optimizer = optim.optimizer(recipe, optim.schedule(recipe, 1, 1.0))
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        step = chosen_step(run, checkpoints, which)
        state = checkpoints.restore(step, steps.initial_state(recipe, params, stats, optimizer))
    numbers = state.average or {"params": state.params, "stats": state.stats}
    return Trained(net, numbers["params"], numbers["stats"], step)


def chosen_step(run: Run, checkpoints: Checkpoints, which: str) -> int:
    """The step that "best", "newest" or a number names."""
    known = checkpoints.steps()
    if not known:
        raise UserError(f"{run.folder} has no checkpoint yet")
    if which in ("best", "newest"):
        return (checkpoints.best() if which == "best" else checkpoints.newest()) or known[-1]
    if not which.isdecimal() or int(which) not in known:
        raise UserError(
            f"{run.folder} has no checkpoint {which!r}: {nearest(which, ['best', 'newest', *map(str, known)])}"
        )
    return int(which)


def named(*trees: Tree) -> dict[str, Any]:
    """The arrays of nested dicts by name.

    >>> named({"conv": {"kernel": 1}}, {"norm": {"mean": 2}})
    {'conv.kernel': 1, 'norm.mean': 2}
    """
    leaves = [pair for tree in trees for pair in jax.tree.leaves_with_path(tree)]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
