"""Divergence: what a run does about consecutive non-finite updates.

An update whose loss or gradient is not finite is skipped: nothing is learnt from it. After `train.bad_updates` = M
consecutive ones, the parameters are probably beyond repair: the run rolls back by M updates and skips their batches and
those of the M updates that were skipped (as Chowdhery et al., "PaLM", 2022, section 5.1 do by hand). Later updates take
the batches that come next, so the number of updates stays the same.

Which batches are skipped depends on the recipe alone and is stored in the run, so that a resumed run goes through the
same batches. The second time, the run ends, and `diverged/` holds what is needed to look into it.
"""

import json
import shutil
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PyTree

from podscale.config.json_types import JsonObject
from podscale.data.balance import make_order
from podscale.data.order import map_steps_to_batches
from podscale.errors import DivergedError, UserError
from podscale.plan import Plan
from podscale.processes import group
from podscale.runs.folder import Run
from podscale.storage.files import to_json, write_durably
from podscale.training.checkpoint.checkpoints import CheckpointNotSavedError, Checkpoints
from podscale.training.nonfinite import DivergenceError
from podscale.training.program import Program

SKIPPED_BATCHES = "left-out.json"
BUNDLE = "diverged"
UNDONE = "undone"  # the folder for checkpoints that a run has rolled back from
MAX_ROLLBACKS = 1
BUNDLE_UPDATES = 100  # the last updates, whose loss and gradient norm the bundle holds


class RolledBackError(Exception):
    """The run has been rolled back to before it diverged, and continues from there."""


# --- skipped batches -------------------------------------------------------------------------------------------------


def read_skipped_batches(folder: Path) -> list[range]:
    """Return the batches that a run skips, in order; usually none."""
    path = folder / SKIPPED_BATCHES
    if not path.exists():
        return []
    try:
        return [range(first, last + 1) for first, last in json.loads(path.read_text(encoding="utf-8"))["batches"]]
    except (ValueError, LookupError, TypeError):
        raise UserError(
            f"{path} is damaged: it must list the batches that this run skips since it diverged; bring it back, or "
            "choose another folder with --run"
        ) from None


def describe_skipped_batches(skipped: list[range]) -> JsonObject:
    """Return what `left-out.json` holds, and the manifest of every checkpoint that was trained without them.

    >>> describe_skipped_batches([range(3, 7)])
    {'batches': [[3, 6]]}
    """
    return {"batches": [[gap.start, gap.stop - 1] for gap in skipped]}


def check_skipped_batches(folder: Path, step: int, facts: object) -> None:
    """Refuse a checkpoint whose run skips batches that the run's list no longer has: it would go on with others.

    Args:
        folder: the run's.
        step: of the checkpoint.
        facts: what was written beside it. It may skip less than the run: it is from before that diverged.

    Raises:
        UserError: the list was lost.
    """
    saved = facts.get("left_out", {"batches": []})["batches"] if isinstance(facts, dict) else []
    listed = describe_skipped_batches(read_skipped_batches(folder))["batches"]
    if listed[: len(saved)] != saved:
        raise UserError(
            f"{folder / SKIPPED_BATCHES} does not list the batches that the run's checkpoint of step {step:,} skips; "
            f"bring it back; it has to begin with {json.dumps(saved)}"
        )


def count_checkpoints_to_keep(plan: Plan) -> int:
    """Return how many of the newest checkpoints to keep, so that one of them is always old enough to roll back to."""
    points, reach = sorted({0, *plan.save_points()}), 2 * plan.recipe.train.bad_updates
    within = max(i - bisect_right(points, point - reach) + 1 for i, point in enumerate(points)) if reach else 0
    return max(plan.options.keep, within + 1)


def handle_divergence(error: DivergenceError, program: Program, run: Run, checkpoints: Checkpoints) -> Exception:
    """Roll the run back the first time, write the bundle the second time. Returns the exception to raise."""
    limit, skipped = program.plan.recipe.train.bad_updates, read_skipped_batches(run.folder)
    steps = range(max(error.first - limit, 0), error.first + limit)
    batches = map_steps_to_batches(np.array(steps), skipped)
    problem = f"loss or gradient were non-finite for {limit} updates in a row after step {error.first:,}"
    if len(skipped) >= MAX_ROLLBACKS:
        group.run_on_main_process(lambda: _write_bundle(problem, steps, batches, error.state, program, run))
        content = "has the batches, statistics, recipe, and how to repeat it"
        return DivergedError(f"{problem}, again after a rollback; {run.folder / BUNDLE} {content}")
    with suppress(CheckpointNotSavedError):  # that checkpoint would be too new to roll back to
        checkpoints.wait()
    target = max((step for step in checkpoints.steps() if step <= steps.start), default=0)
    if not target:
        checkpoints.forget()  # first: a run that is killed after the moves would seem to have lost its checkpoints
    for step in [step for step in checkpoints.steps() if step > steps.start]:
        checkpoints.move_aside(step, UNDONE)
    first, last = int(batches[0]), int(batches[-1])
    text = json.dumps(describe_skipped_batches([*skipped, range(first, last + 1)]))
    group.run_on_main_process(lambda: write_durably(run.folder / SKIPPED_BATCHES, text))
    return RolledBackError(f"{problem}; rolling back to step {target:,}, and skipping batches {first:,} to {last:,}")


# --- the bundle ------------------------------------------------------------------------------------------------------


def _write_bundle(problem: str, steps: range, batches: np.ndarray, state: PyTree, program: Program, run: Run) -> None:
    """Write a folder with what is needed to look into it: samples, statistics, recipe, and how to repeat it."""
    folder = run.folder / BUNDLE
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    recipe = program.plan.recipe
    order = make_order(recipe, program.data.train.labels)
    samples = order.get_samples(batches[:, None], np.arange(recipe.batch.size))[0]
    lines = [
        {"step": step, "batch": int(batch), "samples": ids.tolist()}
        for step, batch, ids in zip(steps, batches, samples, strict=True)
    ]
    updates = [line for line in run.metrics() if line["event"] == "train" and line["step"] <= steps.stop]
    arrays = {name: _summarize_arrays(tree) for name, tree in state._asdict().items() if name in ("params", "stats")}
    (folder / "batches.json").write_text(json.dumps(lines))
    (folder / "statistics.json").write_text(to_json({"updates": updates[-BUNDLE_UPDATES:], **arrays}, indent=1))
    (folder / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    shutil.copy(run.folder / "plan.json", folder / "plan.json")
    readme = _README.format(problem=problem, run=run.folder.absolute(), data=recipe.data.path or "-")
    (folder / "README.txt").write_text(readme)


def _summarize_arrays(tree: PyTree) -> dict[str, JsonObject]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _summarize_array(leaf.addressable_data(0))
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _summarize_array(array: jax.Array) -> JsonObject:
    """Return shape, number of non-finite values, and range and root mean square of the finite ones."""
    values = np.asarray(array, np.float64)
    finite = values[np.isfinite(values)]
    return {
        "shape": list(values.shape),
        "no_numbers": int(values.size - finite.size),
        "smallest": float(finite.min()) if finite.size else None,
        "largest": float(finite.max()) if finite.size else None,
        "rms": float(np.sqrt(np.mean(finite**2))) if finite.size else None,
    }


_README = """\
{problem}, and not for the first time.

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
