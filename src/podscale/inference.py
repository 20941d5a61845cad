"""Using what was trained: a run's checkpoint evaluated, or asked what is on a picture."""

from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from podscale import models, optim
from podscale import step as steps
from podscale.checkpoint import Checkpoints
from podscale.data import loader
from podscale.data.index import files_index
from podscale.errors import UserError, nearest
from podscale.job import Evaluator, prepare
from podscale.models.functional import Functional, functional
from podscale.options import Options
from podscale.pod import Pod, find
from podscale.run import Run
from podscale.step import State

TOP = 5
EVAL_IMAGES = 64  # per device
PICTURES_AT_ONCE = 64


def open_run(folder: str | None) -> Run:
    """The run in that folder, or the newest one."""
    return Run.load(folder) if folder else Run.newest()


def evaluate(
    run: Run, pod: Pod | None = None, options: Options = Options(), which: str = "best", model: nnx.Module | None = None
) -> dict[str, Any]:
    """Accuracy and loss of a checkpoint over all validation examples of the recipe's data."""
    pod = pod or find()
    # Evaluation does not depend on the batch, so any number of devices will do: the plan gets one that fits.
    share = EVAL_IMAGES * pod.size
    fitting = run.recipe.override({"batch.size": share, "batch.span": EVAL_IMAGES, "data.lanes": 1})
    job = prepare(fitting, pod, options, model)
    if job.data.classes != run.classes():
        raise UserError(f"{run.recipe.data.path} has other classes than {run.folder} was trained on")
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        step = _step(run, checkpoints, which)
        state = checkpoints.restore(step, job.state)
    evaluator = Evaluator(job)
    found = evaluator(state)
    return {**found, "unreadable": evaluator.unreadable, "checkpoint": step, "run": str(run.folder)}


def predict(
    run: Run, pictures: list[str], which: str = "best", model: nnx.Module | None = None
) -> list[dict[str, Any]]:
    """The most likely classes of each picture file, most likely first."""
    index, classes = files_index([Path(p) for p in pictures]).shrunk(run.recipe.data.shrink), run.classes()
    net, state = _restored(run, which, model)
    numbers = state.average or {"params": state.params, "stats": state.stats}
    probabilities = steps.predictor(net, run.recipe)
    found = []
    for start in range(0, len(index), PICTURES_AT_ONCE):
        chosen = range(start, min(start + PICTURES_AT_ONCE, len(index)))
        pixels = loader.eval_pictures(index, chosen, run.recipe)
        for i, row in zip(chosen, np.asarray(probabilities(numbers["params"], numbers["stats"], pixels)), strict=True):
            best = np.argsort(-row, kind="stable")[:TOP]
            top = [{"class": classes[c], "probability": float(row[c])} for c in best]
            found.append({"image": index.name(i), "top": top})
    return found


def restore(run: Run, which: str = "best", model: nnx.Module | None = None) -> nnx.Module:
    """The trained network, ready to be called on normalized images; by the averaged weights if there are."""
    net, state = _restored(run, which, model)
    numbers = state.average or {"params": state.params, "stats": state.stats}
    trained: nnx.Module = net.model(numbers["params"], numbers["stats"])
    trained.eval()
    return trained


def _restored(run: Run, which: str, model: nnx.Module | None) -> tuple[Functional, State]:
    recipe, classes = run.recipe, len(run.classes())
    model = model or models.build(recipe.model, classes, recipe.data.image_size, recipe.train.seed)
    net, params, stats = functional(model)
    # The schedule's length has no part in the state's structure, which is all that is wanted here.
    optimizer = optim.optimizer(recipe, optim.schedule(recipe, 1, 1.0))
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        step = _step(run, checkpoints, which)
        return net, checkpoints.restore(step, steps.initial_state(recipe, params, stats, optimizer))


def _step(run: Run, checkpoints: Checkpoints, which: str) -> int:
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
