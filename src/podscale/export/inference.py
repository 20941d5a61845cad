"""Use a trained model: evaluate a run's checkpoint, or classify images with it."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

import jax
import numpy as np
from flax import nnx

from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.data.image_files import ImageFiles, list_image_files
from podscale.errors import UserError
from podscale.models.registry import list_models
from podscale.pod import Pod, find_pod
from podscale.report.metrics import compute_scores, describe_baseline
from podscale.runs.folder import Run
from podscale.training import restore as trained_models
from podscale.training import step as steps
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.cpu_options import make_cpu_options
from podscale.training.evaluate import Evaluator
from podscale.training.setup import prepare

T = TypeVar("T")
TOP = 5  # classes of a prediction
EVAL_IMAGES = 64  # per device


def open_run(folder: str | None) -> Run:
    """Return the run in that folder, or the newest one that has a checkpoint.

    Raises:
        UserError: there is none, or its model is the user's own and has not been registered.
    """
    run = Run.load(folder) if folder else Run.load_newest(trained=True)
    source = (Run.read_plan(run.folder) or {}).get("model_source")
    if source and run.recipe.model.name not in list_models():
        raise UserError(f"{run.where} has the model {run.recipe.model.name!r} of {source}; add --import {source}")
    return run


def find_checkpoint(run: Run, which: str = "best") -> int:
    """Return the step of a checkpoint: "best", "newest" or a step.

    Raises:
        UserError: there is no such checkpoint.
    """
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        return trained_models.choose_step(run, checkpoints, which)


def describe_checkpoint(run: Run, step: int) -> str:
    """Return which model answers: the run's folder, the checkpoint and its accuracy."""
    accuracies = [line["accuracy"] for line in run.metrics() if line["event"] == "eval" and line["step"] == step]
    accuracy = f"validation accuracy {accuracies[-1]:.2%}" if accuracies else "not evaluated"
    return f"{run.where}, checkpoint {step}, {accuracy}"


def evaluate(
    run: Run, pod: Pod | None = None, options: Options = Options(), which: str = "best", model: nnx.Module | None = None
) -> JsonObject:
    """Return accuracy and loss of a checkpoint over all validation examples of the recipe's data.

    Args:
        run: the run, such as `Run.load("runs/digits")`.
        pod: the devices to evaluate on; all devices by default. Their number does not change the result.
        options: how to run it.
        which: the checkpoint: "best", "newest" or a step.
        model: a flax.nnx module instead of the recipe's own.

    Returns:
        `accuracy`, `accuracy_top5`, `loss` and `examples`; the scores of `podscale.report.metrics.compute_scores`, the
        `classes` that their lists follow, and a `warning` if the model does not beat the baseline; `unreadable`, a
        sentence for each image that could not be read; the step of the `checkpoint`, and the `run`.

    Raises:
        UserError: there is no such checkpoint, or the data set has other classes.

    Examples:
        >>> import tempfile
        >>> import podscale
        >>> from rich.console import Console
        >>> recipe = podscale.load_recipe("digits").override({"model.width": 4, "train.epochs": 0.1})
        >>> pod, quiet = podscale.find_pod(virtual="1x1"), Console(quiet=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     summary = podscale.train(recipe, pod=pod, folder=folder, console=quiet)
        ...     result = podscale.evaluate(podscale.Run.load(folder), pod)
        >>> result["examples"], result["checkpoint"]
        (360, 2)
    """
    pod = pod or find_pod()
    # Evaluation does not depend on the batch, so the plan gets one that fits any number of devices.
    fitting = run.recipe.override({"batch.size": EVAL_IMAGES * pod.size, "batch.span": EVAL_IMAGES, "data.lanes": 1})
    program = prepare(fitting, pod, options, model)
    if program.data.classes != run.classes():
        raise UserError(f"{run.recipe.data.path} has other classes than {run.where} was trained on")
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        step = trained_models.choose_step(run, checkpoints, which)
        state = program.restore_state(partial(checkpoints.restore, step))
    evaluator = Evaluator(program)
    result = evaluator(state)
    scores = compute_scores(program.data.val.labels, evaluator.predictions, len(run.classes()))
    warning = describe_baseline(result["accuracy"], scores, run.classes())
    facts = {"unreadable": evaluator.unreadable_images, "checkpoint": step, "run": run.where}
    return {**result, **scores, "classes": list(run.classes()), "warning": warning, **facts}


def predict(
    run: Run, images: Sequence[str | os.PathLike[str]], which: str = "best", model: nnx.Module | None = None
) -> list[JsonObject]:
    """Classify images.

    Args:
        run: the run whose model to use.
        images: image files, folders of them, or "-" for a list of them on standard input.
        which: the checkpoint: "best", "newest" or a step.
        model: a flax.nnx module instead of the recipe's own.

    Returns:
        For each image, in order, `image`, its path, and `top`, its five most likely classes, most likely first. An
        image that cannot be read has `error`, one sentence, instead of `top`.

    Raises:
        UserError: there is no such checkpoint, or no image.

    Examples:
        >>> import tempfile
        >>> import podscale
        >>> from rich.console import Console
        >>> recipe = podscale.load_recipe("digits").override({"model.width": 4, "train.epochs": 0.1})
        >>> pod, quiet = podscale.find_pod(virtual="1x1"), Console(quiet=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     summary = podscale.train(recipe, pod=pod, folder=folder, console=quiet)
        ...     run = podscale.Run.load(folder)
        ...     (prediction,) = podscale.predict(run, [run.folder / "sample.png"])
        >>> len(prediction["top"]), sorted(prediction["top"][0])
        (5, ['class', 'probability'])
    """
    return list(iterate_predictions(run, images, which, model))


def iterate_predictions(
    run: Run, images: Sequence[str | os.PathLike[str]], which: str = "best", model: nnx.Module | None = None
) -> Iterator[JsonObject]:
    """Yield the predictions of `predict`, each as soon as it is known."""
    classes, files = run.classes(), ImageFiles(list_image_files(images), run.recipe, jax.devices()[0])
    trained = trained_models.load_trained(run, which, model)
    options = make_cpu_options() if files.device.platform == "cpu" else None
    probabilities = steps.make_predictor(trained.net, run.recipe, options)
    params, stats = jax.device_put((trained.params, trained.stats), files.device)
    first = 0
    with files.make_batches() as batches:
        started = ((batch.count, probabilities(params, stats, batch.images)) for batch in batches)
        for count, result in _delay_by_one(started):
            for number, row in enumerate(np.asarray(result)[:count], start=first):
                problem = files.problems.get(number)
                yield {"image": files.names[number]} | (
                    {"error": problem} if problem else {"top": _top_classes(row, classes)}
                )
            first += count


def _delay_by_one(items: Iterator[T]) -> Iterator[T]:
    """Yield the same items, each once the next has been started, so that the device always has work."""
    previous = list(islice(items, 1))
    for item in items:
        yield previous.pop()
        previous.append(item)
    yield from previous


def _top_classes(probabilities: np.ndarray, classes: tuple[str, ...]) -> list[JsonObject]:
    best = np.argsort(-probabilities, kind="stable")[:TOP]
    return [{"class": classes[c], "probability": float(probabilities[c])} for c in best]


def load_model(run: Run, which: str = "best", model: nnx.Module | None = None) -> nnx.Module:
    """Return the trained network as a flax.nnx module in evaluation mode.

    Args:
        run: the run.
        which: the checkpoint: "best", "newest" or a step.
        model: a flax.nnx module instead of the recipe's own.

    Returns:
        A module that maps normalized images [n, h, w, 3] to logits [n, classes]. It has the averaged weights if the
        recipe has an average.

    Raises:
        UserError: there is no such checkpoint, or it does not fit the model.

    Examples:
        >>> import tempfile
        >>> import podscale
        >>> from rich.console import Console
        >>> recipe = podscale.load_recipe("digits").override({"model.width": 4, "train.epochs": 0.1})
        >>> pod, quiet = podscale.find_pod(virtual="1x1"), Console(quiet=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     summary = podscale.train(recipe, pod=pod, folder=folder, console=quiet)
        ...     network = podscale.load_model(podscale.Run.load(folder))
        >>> import jax.numpy as jnp
        >>> network(jnp.zeros((3, 8, 8, 3))).shape
        (3, 10)
    """
    return trained_models.load_trained(run, which, model).build_module()
