"""Trained models: the network of a run's checkpoint, with its weights."""

from typing import NamedTuple

from flax import nnx

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.models import registry
from podscale.models.functional import FunctionalModel, Tree, make_functional
from podscale.optim import optimizers, schedules
from podscale.runs.folder import Run
from podscale.training import step as steps
from podscale.training.checkpoint.checkpoints import Checkpoints


class TrainedModel(NamedTuple):
    """A network and its weights at a checkpoint's step.

    Weights are averaged over steps if the recipe has an average.
    """

    net: FunctionalModel
    params: Tree
    stats: Tree
    step: int

    def build_module(self) -> nnx.Module:
        """Return the network with its weights in evaluation mode, ready to be called on normalized images."""
        model: nnx.Module = self.net.build_module(self.params, self.stats)
        model.eval()
        return model


def load_trained(run: Run, which: str = "best", model: nnx.Module | None = None) -> TrainedModel:
    """Return the model of a checkpoint.

    Args:
        run: the run.
        which: "best", "newest" or a step.
        model: a flax.nnx module instead of the recipe's own.

    Raises:
        UserError: there is no such checkpoint, or it does not fit the model.
    """
    recipe, classes = run.recipe, len(run.classes())
    model = model or registry.build_model(recipe.model, classes, recipe.data.image_size, recipe.train.seed)
    net, params, stats = make_functional(model, recipe.model.freeze)
    # Only the state's structure is needed here, and the schedule's length has no part in it.
    optimizer = net.wrap_optimizer(
        optimizers.make_optimizer(recipe, schedules.make_schedule(recipe, 1, 1.0), stem=net.stem, head=net.head)
    )
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        step = choose_step(run, checkpoints, which)
        state = checkpoints.restore(step, steps.init_state(recipe, params, stats, optimizer))
    weights = state.average or {"params": state.params, "stats": state.stats}
    return TrainedModel(net, weights["params"], weights["stats"], step)


def choose_step(run: Run, checkpoints: Checkpoints, which: str) -> int:
    """Return the step that "best", "newest" or a number refers to."""
    available = checkpoints.steps()
    if not available:
        raise UserError(f"{run.where} has no checkpoint yet")
    if which in ("best", "newest"):
        return (checkpoints.best() if which == "best" else checkpoints.newest()) or available[-1]
    if not which.isdecimal() or int(which) not in available:
        names = ["best", "newest", *map(str, available)]
        raise UserError(f"{run.where} has no checkpoint {which!r}: {suggest_names(which, names)}")
    return int(which)
