"""Divergence: updates without a number, one after another, and what a run does about them.

An update whose loss or gradient is no number is skipped, and nothing is learnt from it. Where that happens
`train.bad_updates` = M times in a row, what has been learnt is probably beyond repair: the run goes back by M updates
and leaves out their batches and those of the M updates that were skipped (as Chowdhery et al., "PaLM", 2022, section
5.1 do by hand). Updates after that take the batches that come next, so there are as many updates as before.

Which batches are left out depends on the recipe alone, and is written down in the run: whoever resumes it goes through
the same batches. A second time, the run ends, and what is needed to look into it lies in `diverged/`.
"""

import json
import shutil
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podscale.data.order import Order, batches_at
from podscale.errors import DivergedError
from podscale.plan import Plan
from podscale.processes import group
from podscale.runs.folder import Run
from podscale.storage.files import to_json, write_atomically
from podscale.training.checkpoint import Checkpoints, NotSavedError
from podscale.training.nonfinite import DivergenceError
from podscale.training.setup import Job

LEFT_OUT = "left-out.json"
BUNDLE = "diverged"
UNDONE = "undone"  # checkpoints that a run went back behind
MOST_RETURNS = 1
TOLD_UPDATES = 100  # of which the bundle tells loss and gradient


class WentBackError(Exception):
    """The run has been put back to before it went wrong, and shall go on from there."""


# --- batches that are left out ---------------------------------------------------------------------------------------


def left_out(folder: Path) -> list[range]:
    """The batches that a run leaves out, in order; none, as a rule."""
    path = folder / LEFT_OUT
    if not path.exists():
        return []
    return [range(first, last + 1) for first, last in json.loads(path.read_text(encoding="utf-8"))["batches"]]


def kept(plan: Plan) -> int:
    """How many of the newest checkpoints must stay, so that one of them is always old enough to go back to."""
    points, reach = sorted({0, *plan.save_points()}), 2 * plan.recipe.train.bad_updates
    within = max(i - bisect_right(points, point - reach) + 1 for i, point in enumerate(points)) if reach else 0
    return max(plan.keep, within + 1)


def answered(found: DivergenceError, job: Job, run: Run, checkpoints: Checkpoints) -> Exception:
    """Puts the run back, the first time; else writes the bundle. Returns what to raise."""
    M, known = job.recipe.train.bad_updates, left_out(run.folder)
    steps = range(max(found.first - M, 0), found.first + M)
    numbers = batches_at(np.array(steps), known)
    what = f"loss or gradient were no number for {M} updates in a row after step {found.first:,}"
    if len(known) >= MOST_RETURNS:
        group.run_on_main_process(lambda: _write_bundle(what, steps, numbers, found.state, job, run))
        told = "has the batches, statistics, recipe, and how to repeat it"
        return DivergedError(f"{what}, and not for the first time; {run.folder / BUNDLE} {told}")
    with suppress(NotSavedError):  # it would not have been one to go back to
        checkpoints.wait()
    for step in [step for step in checkpoints.steps() if step > steps.start]:
        checkpoints.set_aside(step, UNDONE)
    first, last = int(numbers[0]), int(numbers[-1])
    text = json.dumps({"batches": [*([gap.start, gap.stop - 1] for gap in known), [first, last]]})
    group.run_on_main_process(lambda: write_atomically(run.folder / LEFT_OUT, text))
    back = checkpoints.newest() or 0
    return WentBackError(f"{what}; going back to step {back:,}, and leaving out batches {first:,} to {last:,}")


# --- the bundle ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Array:
    """What there is to know of an array that may hold anything."""

    shape: list[int]
    no_numbers: int
    smallest: float | None
    largest: float | None
    rms: float | None

    @classmethod
    def of(cls, array: Any) -> "_Array":
        values = np.asarray(array, np.float64)
        sound = values[np.isfinite(values)]
        few = (float(sound.min()), float(sound.max()), float(np.sqrt(np.mean(sound**2)))) if sound.size else [None] * 3
        return cls(list(values.shape), int(values.size - sound.size), *few)


def _write_bundle(told: str, steps: range, numbers: np.ndarray, state: Any, job: Job, run: Run) -> None:
    """A folder with all that is needed to look into it: which samples, which numbers, and how to come there again."""
    folder = run.folder / BUNDLE
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    recipe = job.recipe
    order = Order(len(job.data.train), recipe.data.lanes, recipe.batch.size, recipe.train.seed)
    samples = order.at(numbers[:, None], np.arange(recipe.batch.size))[0]
    batches = [
        {"step": step, "batch": int(number), "samples": ids.tolist()}
        for step, number, ids in zip(steps, numbers, samples, strict=True)
    ]
    updates = [line for line in run.metrics() if line["event"] == "train" and line["step"] <= steps.stop]
    numbers_of = {name: _arrays(tree) for name, tree in state._asdict().items() if name in ("params", "stats")}
    (folder / "batches.json").write_text(json.dumps(batches))
    (folder / "statistics.json").write_text(to_json({"updates": updates[-TOLD_UPDATES:], **numbers_of}, indent=1))
    (folder / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    shutil.copy(run.folder / "plan.json", folder / "plan.json")
    (folder / "README.txt").write_text(_HOW.format(told=told, run=run.folder.absolute(), data=recipe.data.path or "-"))


def _arrays(tree: Any) -> dict[str, dict[str, Any]]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): vars(_Array.of(leaf.addressable_data(0)))
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


_HOW = """\
{told}, and not for the first time.

batches.json      for each update: its step, its batch, and the samples of the batch by position
statistics.json   loss, gradient norm and learning rate of the last updates; what parameters and statistics hold
recipe.toml       what is learnt
plan.json         on what, and by which libraries

To repeat it, from the last checkpoint:

    cp -r {run} again
    podscale train again/recipe.toml --run again

with the same --pod and --plan options as before. The data is {data}.
To go on otherwise, change the recipe and allow it: a lower schedule.peak, a longer schedule.warmup_epochs, or
optimizer.clip_norm, and --allow-changed recipe. To let the run go on skipping: --train.bad_updates 0.
"""
