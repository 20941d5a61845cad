"""Load the trained network from a run's checkpoint."""

from typing import NamedTuple

from flax import nnx

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.models import registry
from podscale.models.functional import Functional, Tree, functional
from podscale.optim import optimizers, schedules
from podscale.runs.folder import Run
from podscale.training import step as steps
from podscale.training.checkpoint import Checkpoints


class TrainedModel(NamedTuple):
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


def load_trained(run: Run, which: str = "best", model: nnx.Module | None = None) -> TrainedModel:
    """What the run's checkpoint "best", "newest" or of a step holds; `model` replaces the recipe's own."""
    recipe, classes = run.recipe, len(run.classes())
    model = model or registry.build(recipe.model, classes, recipe.data.image_size, recipe.train.seed)
    net, params, stats = functional(model, recipe.model.freeze)
    # The schedule's length has no part in the state's structure, which is all that is wanted here.
    optimizer = net.learner(
        optimizers.make_optimizer(recipe, schedules.make_schedule(recipe, 1, 1.0), stem=net.stem, head=net.head)
    )
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        step = choose_step(run, checkpoints, which)
        state = checkpoints.restore(step, steps.initial_state(recipe, params, stats, optimizer))
    numbers = state.average or {"params": state.params, "stats": state.stats}
    return TrainedModel(net, numbers["params"], numbers["stats"], step)


def choose_step(run: Run, checkpoints: Checkpoints, which: str) -> int:
    """The step that "best", "newest" or a number names."""
    known = checkpoints.steps()
    if not known:
        raise UserError(f"{run.folder} has no checkpoint yet")
    if which in ("best", "newest"):
        return (checkpoints.best() if which == "best" else checkpoints.newest()) or known[-1]
    if not which.isdecimal() or int(which) not in known:
        raise UserError(
            f"{run.folder} has no checkpoint {which!r}: {suggest_names(which, ['best', 'newest', *map(str, known)])}"
        )
    return int(which)
