"""Rehearsal: a whole training walked through without computing it, so that a pod's time is not spent on finding out.

The data set is opened, the plan is made, every step's samples are drawn and counted, the learning rate is followed to
the end, some pictures are decoded, a checkpoint of full size is written, read back and thrown away. What is found is
what the run itself would do: it goes through the same index, order, schedule and checkpoints.
"""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from podscale.config.options import Options
from podscale.data import crop, prefetch
from podscale.data.order import Order, crop_boxes
from podscale.errors import UserError
from podscale.pod import Pod
from podscale.recipe import Recipe
from podscale.training.checkpoint import Checkpoints
from podscale.training.setup import Job, prepare

T = TypeVar("T")
Tell = Callable[[str], object]
PIECE = 1 << 20  # positions that are drawn at a time
RATES = 24  # points of the learning rate that are told


def rehearse(
    recipe: Recipe, pod: Pod, options: Options = Options(), *, images: int = 256, tell: Tell = lambda what: None
) -> dict[str, Any]:
    """What a training of `recipe` on `pod` would do; `images` pictures of its first step are decoded."""
    if jax.process_count() > 1:
        raise UserError("a rehearsal is for one process; start it without a launcher")
    if images < 0:
        raise UserError(f"--images must be 0 or more, not {images}")
    tell("opening the data set")
    opening_s, job = _timed(lambda: prepare(recipe, pod, options))
    plan = job.plan
    tell("drawing every step's samples")
    order_s, order = _timed(lambda: _order(job))
    tell("decoding the first pictures")
    decoding_s, bad = _timed(lambda: _decoded(job, images))
    tell("writing a checkpoint")
    evals = plan.eval_steps()
    return {
        "recipe": recipe.name,
        "pod": f"{pod.rows}x{pod.cols} {pod.kind}",
        "train": plan.counts.train,
        "val": plan.counts.val,
        "classes": plan.counts.classes,
        "epochs": recipe.train.epochs,
        "steps": plan.steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "opening_s": opening_s,
        "order": order | {"seconds": order_s, "seconds_per_epoch": order_s / recipe.train.epochs},
        "learning_rate": _rates(job),
        "evaluations": len(evals),
        "evaluated_after": evals,
        "examples_evaluated": len(evals) * plan.counts.val,
        "checkpoints": len(plan.save_points()),
        "checkpoint": _checkpoint(job),
        "decoded": {"pictures": images, "seconds": decoding_s, "unreadable": bad},
    }


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


# --- parts -----------------------------------------------------------------------------------------------------------


def _order(job: Job) -> dict[str, Any]:
    """Draws all positions of all steps. Every sample must come once in each pass over its lane, and never twice."""
    recipe, samples = job.recipe, job.plan.counts.train
    order = Order(samples, recipe.data.lanes, recipe.batch.size, recipe.train.seed)
    per_piece = max(1, PIECE // recipe.batch.size)
    seen: dict[int, NDArray[np.int32]] = {}  # by pass: how often each sample came
    found = {"drawn": job.plan.steps * recipe.batch.size, "whole_passes": 0, "drawn_twice": 0}
    for start in range(0, job.plan.steps, per_piece):
        steps = np.arange(start, min(start + per_piece, job.plan.steps))
        drawn, passes = (part.ravel() for part in order.at(steps[:, None], np.arange(recipe.batch.size)[None]))
        for number in np.unique(passes).tolist():
            counts = seen.setdefault(number, np.zeros(samples, np.int32))
            counts += np.bincount(drawn[passes == number], minlength=samples).astype(np.int32)
        last = start + per_piece >= job.plan.steps
        for number in [number for number in seen if last or number < passes.min()]:
            counts = seen.pop(number)
            found["whole_passes"] += int((counts == 1).all())
            found["drawn_twice"] += int((counts > 1).sum())
    return found


def _rates(job: Job) -> dict[str, Any]:
    """The learning rate: where it is highest, and some points on the way; each (step, rate)."""
    steps = np.arange(job.plan.steps)
    rates = np.asarray(jax.vmap(job.schedule)(steps))
    chosen = np.unique(np.linspace(0, len(steps) - 1, RATES).astype(int))
    highest = int(rates.argmax())
    return {
        "peak": float(rates[highest]),
        "peak_step": highest,
        "last": float(rates[-1]),
        "points": [(int(step), float(rates[step])) for step in chosen],
        "falls_after_peak": all(a >= b for a, b in pairwise(rates[highest:].tolist())),
    }


def _decoded(job: Job, images: int) -> list[str]:
    """Makes the first pictures of the first step as training would; returns those that cannot be read."""
    recipe, index = job.recipe, job.data.train
    count = min(images, recipe.batch.size)
    if not count:
        return []
    order = Order(len(index), recipe.data.lanes, recipe.batch.size, recipe.train.seed)
    samples, passes = order.at(np.zeros(count, np.int64), np.arange(count))
    size, fraction = recipe.data.image_size, recipe.data.eval_fraction
    boxes, flips = crop_boxes(
        recipe.augment, recipe.train.seed, passes, samples, index.sizes[samples], size, fraction=fraction
    )
    bad: list[tuple[int, str]] = []
    with ThreadPoolExecutor(prefetch.cpus()) as pool:
        out = np.empty((count, size, size, 3), np.uint8)
        crop.crop_batch(index, samples, boxes, flips, size, out, pool, bad)
    return [why for _, why in bad]


def _checkpoint(job: Job) -> dict[str, Any]:
    """Writes one of full size, reads it back, and throws it away."""
    with (
        tempfile.TemporaryDirectory(prefix="podscale-rehearsal-") as place,
        Checkpoints(Path(place) / "checkpoints") as checkpoints,
    ):

        def save() -> None:
            checkpoints.save(0, job.state)
            checkpoints.wait()

        saving_s, _ = _timed(save)
        reading_s, _ = _timed(lambda: jax.block_until_ready(checkpoints.restore(0, job.state)))
        size = sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file())
    return {"bytes": size, "saving_s": saving_s, "reading_s": reading_s}


# --- words -----------------------------------------------------------------------------------------------------------


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What was found, for people."""
    order, rate, checkpoint = found["order"], found["learning_rate"], found["checkpoint"]
    decoded = found["decoded"]
    passes = f"{order['whole_passes']} passes whole, every sample once in each; {order['drawn_twice']} drawn twice"
    return [
        ("data", f"{found['train']:,} train, {found['val']:,} val, {found['classes']:,} classes"),
        ("opened in", f"{found['opening_s']:.1f} s"),
        ("steps", f"{found['steps']:,} for {found['epochs']:g} epochs ({found['steps_per_epoch']:.2f} an epoch)"),
        ("order", f"{order['drawn']:,} samples drawn, {order['seconds_per_epoch']:.2f} s an epoch; {passes}"),
        ("learning rate", f"{rate['peak']:.4g} at step {rate['peak_step']:,}, {rate['last']:.3g} at the last"),
        ("evaluations", f"{found['evaluations']}, {found['examples_evaluated']:,} examples in all"),
        (
            "checkpoints",
            f"{found['checkpoints']}, {checkpoint['bytes'] / 1e6:,.1f} MB each, "
            f"saved in {checkpoint['saving_s']:.1f} s, read in {checkpoint['reading_s']:.1f} s",
        ),
        (
            "pictures",
            f"{decoded['pictures']} decoded in {decoded['seconds']:.1f} s, {len(decoded['unreadable'])} unreadable",
        ),
    ]
