"""Using what was trained: a run's checkpoint evaluated, or asked what is on a picture."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from podscale.config.options import Options
from podscale.data.image_files import Pictures, listed
from podscale.errors import UserError
from podscale.pod import Pod, find
from podscale.runs.folder import Run
from podscale.training import step as steps
from podscale.training import trained as trained_models
from podscale.training.checkpoint import Checkpoints
from podscale.training.evaluate import Evaluator
from podscale.training.setup import prepare, restored

T = TypeVar("T")
TOP = 5
EVAL_IMAGES = 64  # per device


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
        step = trained_models.choose_step(run, checkpoints, which)
        state = restored(job, partial(checkpoints.restore, step))
    evaluator = Evaluator(job)
    found = evaluator(state)
    return {**found, "unreadable": evaluator.unreadable, "checkpoint": step, "run": str(run.folder)}


def predict(
    run: Run, pictures: Sequence[str | os.PathLike[str]], which: str = "best", model: nnx.Module | None = None
) -> list[dict[str, Any]]:
    """What is on each picture of these files, folders and lists (`-`); see `predictions`."""
    return list(predictions(run, pictures, which, model))


def predictions(
    run: Run, pictures: Sequence[str | os.PathLike[str]], which: str = "best", model: nnx.Module | None = None
) -> Iterator[dict[str, Any]]:
    """The same, each as soon as it is known: `image`, and `top`, its most likely classes, most likely first.

    A picture that cannot be read has `error`, one sentence, instead of `top`.
    """
    classes, files = run.classes(), Pictures(listed(pictures), run.recipe, jax.devices()[0])
    trained = trained_models.load_trained(run, which, model)
    probabilities = steps.predictor(trained.net, run.recipe)
    params, stats = jax.device_put((trained.params, trained.stats), files.device)
    first = 0
    with files.batches() as batches:
        asked = ((batch.count, probabilities(params, stats, batch.images)) for batch in batches)
        for count, answer in _one_behind(asked):
            for number, row in enumerate(np.asarray(answer)[:count], start=first):
                why = files.problems.get(number)
                yield {"image": files.names[number]} | ({"error": why} if why else {"top": _top(row, classes)})
            first += count


def _one_behind(items: Iterator[T]) -> Iterator[T]:
    """The same items, each handed on once the next is under way."""
    before = list(islice(items, 1))
    for item in items:
        yield before.pop()
        before.append(item)
    yield from before


def _top(row: np.ndarray, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    best = np.argsort(-row, kind="stable")[:TOP]
    return [{"class": classes[c], "probability": float(row[c])} for c in best]


def restore(run: Run, which: str = "best", model: nnx.Module | None = None) -> nnx.Module:
    """The trained network, ready to be called on normalized images; by the averaged weights if there are."""
    return trained_models.load_trained(run, which, model).model()
