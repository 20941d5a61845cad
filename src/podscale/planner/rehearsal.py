"""Rehearse a whole training without computing anything, to find mistakes before they cost a pod's time.

The data set is opened, the plan is made, the samples of every step are computed and counted, the learning rate is
followed to the end, some images are decoded, and a checkpoint of full size is written, read back and deleted. The
rehearsal uses the same index, order, schedule and checkpoints as the run, so it finds what the run would do.
"""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.data import crop
from podscale.data.balance import make_order
from podscale.data.order import compute_crop_boxes
from podscale.errors import UserError
from podscale.pod import Pod
from podscale.processes.host import count_usable_cores
from podscale.recipe import Recipe, find_train_size
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.program import Program
from podscale.training.setup import prepare

T = TypeVar("T")
Report = Callable[[str], object]
POSITIONS_PER_CHUNK = 1 << 20  # positions whose samples are computed at a time
RATE_POINTS = 24  # points of the learning rate in the result


def rehearse(
    recipe: Recipe, pod: Pod, options: Options = Options(), *, images: int = 256, report: Report = lambda part: None
) -> JsonObject:
    """Rehearse a training and return what it would do.

    Args:
        recipe: what to train.
        pod: the devices to train on.
        options: machine options.
        images: how many images of the first step to decode.
        report: is called with the name of each part before it starts.

    Raises:
        UserError: several processes were started, or `images` is negative.
    """
    if jax.process_count() > 1:
        raise UserError("a rehearsal is for one process; start it without a launcher")
    if images < 0:
        raise UserError(f"--images must be 0 or more, not {images}")
    report("opening the data set")
    opening_s, program = _time_call(lambda: prepare(recipe, pod, options))
    plan = program.plan
    report("drawing every step's samples")
    order_s, order = _time_call(lambda: _check_order(program))
    report("decoding the first images")
    decoding_s, bad = _time_call(lambda: _decode_images(program, images))
    report("writing a checkpoint")
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
        "learning_rate": _sample_learning_rate(program),
        "evaluations": len(evals),
        "evaluated_after": evals,
        "examples_evaluated": len(evals) * plan.counts.val,
        "checkpoints": len(plan.save_points()),
        "checkpoint": _try_checkpoint(program),
        "decoded": {"images": images, "seconds": decoding_s, "unreadable": bad},
    }


def _time_call(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


# --- parts -----------------------------------------------------------------------------------------------------------


def _check_order(program: Program) -> JsonObject:
    """Count the samples of all steps: each must occur once in each pass over its lane, and never twice."""
    recipe, samples = program.plan.recipe, program.plan.counts.train
    order = make_order(recipe, program.data.train.labels)
    steps_per_chunk = max(1, POSITIONS_PER_CHUNK // recipe.batch.size)
    occurrences: dict[int, NDArray[np.int32]] = {}  # by pass: how often each sample occurred
    result = {"drawn": program.plan.steps * recipe.batch.size, "whole_passes": 0, "drawn_twice": 0}
    for start in range(0, program.plan.steps, steps_per_chunk):
        steps = np.arange(start, min(start + steps_per_chunk, program.plan.steps))
        sampled, passes = (
            part.ravel() for part in order.get_samples(steps[:, None], np.arange(recipe.batch.size)[None])
        )
        for number in np.unique(passes).tolist():
            counts = occurrences.setdefault(number, np.zeros(samples, np.int32))
            counts += np.bincount(sampled[passes == number], minlength=samples).astype(np.int32)
        last = start + steps_per_chunk >= program.plan.steps
        for number in [number for number in occurrences if last or number < passes.min()]:
            counts = occurrences.pop(number)
            result["whole_passes"] += int((counts == 1).all())
            result["drawn_twice"] += int((counts > 1).sum())
    return result


def _sample_learning_rate(program: Program) -> JsonObject:
    """Return the learning rate's peak, its last value, and some points (step, rate)."""
    steps = np.arange(program.plan.steps)
    rates = np.asarray(jax.vmap(program.schedule)(steps))
    sampled_steps = np.unique(np.linspace(0, len(steps) - 1, RATE_POINTS).astype(int))
    highest = int(rates.argmax())
    return {
        "peak": float(rates[highest]),
        "peak_step": highest,
        "last": float(rates[-1]),
        "points": [(int(step), float(rates[step])) for step in sampled_steps],
        "falls_after_peak": all(a >= b for a, b in pairwise(rates[highest:].tolist())),
    }


def _decode_images(program: Program, images: int) -> list[str]:
    """Load and crop the first images of the first step as training would; return why some cannot be read."""
    recipe, index = program.plan.recipe, program.data.train
    count = min(images, recipe.batch.size)
    if not count:
        return []
    order = make_order(recipe, index.labels)
    samples, passes = order.get_samples(np.zeros(count, np.int64), np.arange(count))
    size, fraction = find_train_size(recipe, 0, len(index)), recipe.data.eval_fraction
    boxes, flips = compute_crop_boxes(
        recipe.augment, recipe.train.seed, passes, samples, index.sizes[samples], size, fraction=fraction
    )
    bad: list[tuple[int, str]] = []
    with ThreadPoolExecutor(count_usable_cores()) as pool:
        out = np.empty((count, size, size, 3), np.uint8)
        crop.crop_batch(index, samples, boxes, flips, out, pool, bad)
    return [reason for _, reason in bad]


def _try_checkpoint(program: Program) -> JsonObject:
    """Write a checkpoint of full size, read it back, and delete it; return its bytes and the seconds of both."""
    with (
        tempfile.TemporaryDirectory(prefix="podscale-rehearsal-") as folder,
        Checkpoints(Path(folder) / "checkpoints") as checkpoints,
    ):
        state = program.to_checkpoint(program.init_state())

        def save() -> None:
            checkpoints.save(0, state)
            checkpoints.wait()

        saving_s, _ = _time_call(save)
        reading_s, _ = _time_call(lambda: jax.block_until_ready(checkpoints.restore(0, state)))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {"bytes": size, "saving_s": saving_s, "reading_s": reading_s}


# --- text ------------------------------------------------------------------------------------------------------------


def format_rows(result: JsonObject) -> list[tuple[str, str]]:
    """Return the result as rows of a table: names and values."""
    order, rate, checkpoint = result["order"], result["learning_rate"], result["checkpoint"]
    decoded = result["decoded"]
    passes = f"{order['whole_passes']} passes whole, every sample once in each; {order['drawn_twice']} drawn twice"
    return [
        ("data", f"{result['train']:,} train, {result['val']:,} val, {result['classes']:,} classes"),
        ("opened in", f"{result['opening_s']:.1f} s"),
        ("steps", f"{result['steps']:,} for {result['epochs']:g} epochs ({result['steps_per_epoch']:.2f} per epoch)"),
        ("order", f"{order['drawn']:,} samples drawn, {order['seconds_per_epoch']:.2f} s per epoch; {passes}"),
        ("learning rate", f"{rate['peak']:.4g} at step {rate['peak_step']:,}, {rate['last']:.3g} at the last"),
        ("evaluations", f"{result['evaluations']}, {result['examples_evaluated']:,} examples in all"),
        (
            "checkpoints",
            f"{result['checkpoints']}, {checkpoint['bytes'] / 1e6:,.1f} MB each, "
            f"saved in {checkpoint['saving_s']:.1f} s, read in {checkpoint['reading_s']:.1f} s",
        ),
        (
            "images",
            f"{decoded['images']} decoded in {decoded['seconds']:.1f} s, {len(decoded['unreadable'])} unreadable",
        ),
    ]
