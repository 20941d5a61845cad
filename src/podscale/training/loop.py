"""The training loop: a recipe on a pod becomes a trained model in a run's folder. Read it from top to bottom.

`train` runs sessions until one ends without a rollback; a session prepares, resumes and calls the loop; the loop loads,
updates, evaluates and saves.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from PIL import Image
from rich.console import Console

from podscale import pod as pods
from podscale.config.options import Options
from podscale.config.stop_condition import StopCondition
from podscale.data import loader
from podscale.errors import PreemptedError, UserError
from podscale.forecast import chips, choice
from podscale.forecast.compute import count_model_work
from podscale.forecast.model import Forecast, make_forecast
from podscale.models import registry
from podscale.models.weights.names import digest_file
from podscale.pod import Pod
from podscale.processes import group, heartbeat
from podscale.processes.stragglers import StragglerMonitor
from podscale.processes.watchdog import Watchdog
from podscale.recipe import Recipe
from podscale.report.counter import show_progress
from podscale.report.terminal import make_table
from podscale.runs import environment
from podscale.runs.events import Callback
from podscale.runs.folder import Run
from podscale.runs.ledger import PhaseTimer
from podscale.runs.startup import clock as start_clock
from podscale.storage.files import write_atomically
from podscale.storage.lock import FolderLock
from podscale.training.advice import describe_decoding, list_warnings
from podscale.training.checkpoint import (
    INVALID_METADATA,
    CheckpointNotSavedError,
    Checkpoints,
    DamagedCheckpointError,
    LastCheckpointNotSavedError,
)
from podscale.training.checkpoint_files import find_steps
from podscale.training.compilation import compile_train_step
from podscale.training.divergence import (
    RolledBackError,
    count_checkpoints_to_keep,
    handle_divergence,
    read_skipped_batches,
)
from podscale.training.evaluate import Evaluator
from podscale.training.initial_weights import InitialWeights, check_source
from podscale.training.memory import check_memory
from podscale.training.nonfinite import DivergenceError
from podscale.training.out_of_memory import explain_out_of_memory
from podscale.training.preemption import StopRequest
from podscale.training.program import Program
from podscale.training.replicas import ReplicaCheck, ReplicaMismatchError
from podscale.training.reporters import trackers
from podscale.training.reporters.reporter import Reporter
from podscale.training.setup import cache_images, describe_input, initialize, load_train_batches, prepare
from podscale.training.step import State

RETRY_S = 2.0  # between attempts to save the last state
MAX_WAIT_S = 1800.0  # for disk space at the end, where plan.timeout_s is 0
SHARED_ERRORS = (PreemptedError, ReplicaMismatchError, DivergenceError, LastCheckpointNotSavedError)
MAX_ROLLBACKS = 3  # to the last checkpoint, after replicas differed


def train(
    recipe: Recipe,
    *,
    pod: Pod | None = None,
    options: Options = Options(),
    model: nnx.Module | None = None,
    folder: str | Path | None = None,
    until: StopCondition | None = None,
    console: Console | None = None,
    allow_changed: Collection[str] = (),
    callbacks: Sequence[Callback] = (),
    track: Collection[str] = (),
    from_scratch: bool = False,
) -> dict[str, Any]:
    """Train a recipe, or resume its run, and return the summary.

    Args:
        recipe: what to train.
        pod: the devices to train on; all devices of this machine by default.
        options: how to run it.
        model: a flax.nnx module that maps images [n, h, w, 3] to logits [n, classes], instead of the recipe's own. One
            with random state, such as dropout, is refused, because it would learn something else on every pod.
        folder: the run's folder. The default belongs to the recipe, so that the same call resumes the run.
        until: stop at the first evaluation that meets this condition.
        console: where progress is printed.
        allow_changed: what may differ from the run in `folder`: "recipe", "data" or "versions" (of libraries).
        callbacks: called with every event (see `podscale.runs.events`); one that returns True at an evaluation stops
            the run.
        track: trackers besides TensorBoard, such as "wandb".
        from_scratch: start at step 0 if the run had checkpoints and none of them is left; one that is whole is resumed.

    Returns:
        The summary that `summary.json` in the run's folder holds: steps, accuracy, times and more.

    Raises:
        UserError: the recipe cannot be trained like this; the message says what to change.
        PreemptedError: SIGTERM was received; the state is saved, and the same call resumes.
        KeyboardInterrupt: Ctrl-C; the state is saved as well, unless it was pressed twice.
        DivergedError: loss or gradient were not finite again and again; the run's folder says more.

    Example:
        >>> import tempfile
        >>> import podscale
        >>> from rich.console import Console
        >>> recipe = podscale.load_recipe("digits").override({"model.width": 4, "train.epochs": 0.1})
        >>> pod, quiet = podscale.find_pod(virtual="1x1"), Console(quiet=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     summary = podscale.train(recipe, pod=pod, folder=folder, console=quiet)
        >>> summary["steps"]
        2
    """
    trackers.check_trackers(track)
    check_source(recipe.model.init)
    folder = Path(folder) if folder else Run.default_folder(recipe, model)
    Run.check(folder, recipe, allow_changed)
    pod, console, rollbacks = pod or pods.find_pod(), console or Console(force_jupyter=False), 0
    listeners, permissions = Listeners(callbacks, track), Permissions(allow_changed, from_scratch)
    while True:
        try:
            with explain_out_of_memory():
                return _run_session(recipe, pod, options, model, folder, until, console, permissions, listeners)
        except ReplicaMismatchError as error:
            rollbacks += 1
            if rollbacks > MAX_ROLLBACKS:
                raise UserError(f"{error}, and not for the first time; have that device looked after") from None
            _warn(console, f"{error}; rolling back to the last checkpoint")
        except RolledBackError as error:
            _warn(console, str(error))


class Listeners(NamedTuple):
    """Callbacks and names of trackers, which get every event."""

    callbacks: Sequence[Callback]
    track: Collection[str]


class Permissions(NamedTuple):
    """What the user allows a run to do although it is resumed: see `train`."""

    changes: Collection[str]
    from_scratch: bool


def _run_session(
    recipe: Recipe,
    pod: Pod,
    options: Options,
    model: nnx.Module | None,
    folder: Path,
    until: StopCondition | None,
    console: Console,
    permissions: Permissions,
    listeners: Listeners,
) -> dict[str, Any]:
    """Train from the newest checkpoint to the end of the plan, or to a fault."""
    ledger = PhaseTimer(start_clock.begin_session())
    with ledger.measure("start"):
        console = console if group.is_main_process() else Console(quiet=True)
        options = choice.reuse_choice(options, pod, Run.read_plan(folder))
        with show_progress(console, "indexing") as progress:
            program = prepare(recipe, pod, options, model, progress)
        check_memory(program.plan)
        program = cache_images(program)
        is_new = not _has_checkpoints(Run(folder, recipe), permissions)
        program, weights = initialize(program) if is_new else (program, None)
        facts, lock = describe_input(program), FolderLock(folder)
        start_clock.mark("model")
        run = _open_run(program, weights, lock, facts, folder, permissions.changes)
        start_clock.mark("folder")
    plan = program.plan
    console.print(make_table("plan", [*plan.rows(), *choice.format_rows(program.choice), *describe_decoding(facts)]))
    for text in list_warnings(program, facts, is_new=is_new):
        _warn(console, text)
    if weights:
        console.print(weights.describe(), highlight=False, markup=False)
    with lock, Checkpoints(run.checkpoints, count_checkpoints_to_keep(plan), about=facts) as checkpoints:
        with ledger.measure("restore"):
            state, start = _resume(program, checkpoints, console, permissions, initialized=is_new)
        reporter = Reporter(run, plan, ledger, console, start, until, _forecast_step(program), *listeners)
        if start >= plan.steps or reporter.is_target_reached():
            excess = f": after step {start:,}, and the recipe has {plan.steps:,}" if start > plan.steps else ""
            console.print(f"{run.folder} has already come to its end{excess}", highlight=False, markup=False)
            return reporter.load_past_summary()
        try:
            with StopRequest(start) as stop, heartbeat.fail_together(*SHARED_ERRORS):
                return _run_loop(program, state, start, checkpoints, reporter, stop)
        except LastCheckpointNotSavedError as error:
            error.summary |= reporter.write_summary(error.step)
            raise
        except DivergenceError as error:
            raise handle_divergence(error, program, run, checkpoints) from None
        finally:
            reporter.close()


def _run_loop(
    program: Program, state: State, start: int, checkpoints: Checkpoints, reporter: Reporter, stop: StopRequest
) -> dict[str, Any]:
    """Load, update, report, evaluate, save: from step `start` to the end of the plan, a target, or a request to stop.

    One iteration is one compiled call of several updates. Evaluation and saving happen only at the steps that the plan
    fixes, so that a resumed run goes through the same calls as one that never stopped.

    Raises:
        PreemptedError: a stop was requested; the state is saved.
        ReplicaMismatchError: devices no longer hold the same state.
        DivergenceError: too many consecutive updates were non-finite.
    """
    plan, run, ledger = program.plan, reporter.run, reporter.ledger
    replicas = ReplicaCheck(program.mesh, plan.options.check_steps)
    calls, eval_steps, save_steps = plan.calls(start), set(plan.eval_steps()), plan.save_points()
    with ledger.measure("compile"), reporter.console.status("compiling"):
        train_step, evaluate, stragglers = compile_train_step(program, run), Evaluator(program, run), StragglerMonitor()
    data = load_train_batches(program, calls, read_skipped_batches(run.folder))
    with data as batches, Watchdog(plan.options.timeout_s, run.folder) as watchdog, stragglers:
        reporter.start()
        for number, call in enumerate(calls):
            watchdog.record_progress(call.start, "load, train")
            with ledger.measure("input wait"):
                batch = next(batches)
            reporter.report_bad_images(batches.bad_images.pop_messages())
            with ledger.measure("train"):
                state, metrics = train_step(state, batch.images, batch.labels, np.int32(batch.count))
                reporter.record_call(call, metrics)
            stragglers.record_call(ledger.seconds["input wait"], metrics)
            checkpoints.record_completed()
            reporter.report_stragglers(call.stop, stragglers.pop_new())
            stopping = stop.is_requested(number)
            saving = call.stop in save_steps or stopping
            if saving:
                with ledger.measure("train"):
                    reporter.report_pending_call()
            with ledger.measure("check"):
                replicas.check(call.stop, state, now=saving)
            reporter.nonfinite.check(state)
            if not saving:
                continue
            watchdog.record_progress(call.start, "train, evaluate, save")
            accuracy = None
            if call.stop in eval_steps:
                with ledger.measure("evaluate"):
                    result = evaluate(state)
                accuracy = result["accuracy"]
                reporter.report_bad_images(evaluate.unreadable_images)
                reporter.report_evaluation(call.stop, result, evaluate.predictions, program.data.val)
            with ledger.measure("checkpoint"), reporter.warn_on(CheckpointNotSavedError):
                checkpoints.save(call.stop, program.to_checkpoint(state), accuracy)
            reporter.record_checkpoint(call.stop)
            reporter.restart_rate_clock()
            if reporter.is_target_reached():
                break
            if stopping and call.stop < plan.steps:
                with ledger.measure("checkpoint"), reporter.warn_on(CheckpointNotSavedError):
                    checkpoints.wait()
                raise stop.make_error(call.stop)
    with ledger.measure("checkpoint"):
        save = partial(checkpoints.save, call.stop, program.to_checkpoint(state), accuracy)
        _save_last(save, call.stop, checkpoints, reporter, map(stop.is_requested, count(number + 1)))
    return reporter.write_summary(call.stop)


def _save_last(
    save: Callable[[], None], step: int, checkpoints: Checkpoints, reporter: Reporter, stop_requests: Iterator[bool]
) -> None:
    """Return once the state after the last step is on disk.

    Waits for a full disk, as long as for a stuck run (`plan.timeout_s`), or until the run is asked to stop.

    Raises:
        LastCheckpointNotSavedError: in all processes; it never got there.
    """
    limit_s = reporter.plan.options.timeout_s or MAX_WAIT_S
    start_s = time.monotonic()
    while True:
        with reporter.warn_on(CheckpointNotSavedError):
            checkpoints.wait()
        waited_s = time.monotonic() - start_s
        status = group.broadcast_int(2 * checkpoints.is_saved(step) + (waited_s > limit_s))  # the main process decides
        if status > 1:
            return
        if status or next(stop_requests):
            problem = checkpoints.problem or "it is not there"
            raise LastCheckpointNotSavedError(
                f"{reporter.run.folder} could not take the last checkpoint in {waited_s:.0f} s: {problem}; free space, "
                "or make it writable, and give the same command again: it goes on after step "
                f"{checkpoints.newest() or 0}",
                step,
            )
        time.sleep(RETRY_S)
        with reporter.warn_on(CheckpointNotSavedError):
            save()


# --- starting a session ----------------------------------------------------------------------------------------------


def _open_run(
    program: Program,
    weights: InitialWeights | None,
    lock: FolderLock,
    facts: dict[str, Any],
    folder: Path,
    allowed: Collection[str],
) -> Run:
    """Lock and fill the run's folder, which the main process does; if it cannot, all processes end."""

    def fill() -> None:
        if "recipe" not in allowed:
            Run.check_init(folder, weights.digest if weights else digest_file(program.plan.recipe.model.init))
        lock.acquire()
        details = {
            "input": facts,
            "data_digest": program.data.digest(),
            "versions": environment.list_library_versions(),
        }
        details |= {"summations_s": program.choice.predicted} if program.choice.predicted else {}
        details["model_source"] = registry.locate_builder(program.plan.recipe.model.name)
        details["environment"] = environment.describe_machine(list(program.mesh.devices.flat))
        Run.create(folder, program.plan.recipe, program.plan.to_dict() | details, program.data.classes, allowed)
        if weights:
            write_atomically(folder / "init.json", json.dumps(weights.to_dict(), indent=1))
        Image.fromarray(loader.load_eval_images(program.data.val, [0], program.plan.recipe)[0]).save(
            folder / "sample.png"
        )

    group.run_on_main_process(fill)
    return Run(folder, program.plan.recipe)


def _has_checkpoints(run: Run, permissions: Permissions) -> bool:
    """Return whether there is a checkpoint, whole or not, as the main process sees it.

    Raises:
        UserError: the folder cannot be read, or there was a checkpoint and none is left.
    """
    steps: list[int] = []
    find = partial(find_steps, run.checkpoints, allow_lost=permissions.from_scratch)
    group.run_on_main_process(lambda: steps.extend(find()))
    return bool(group.broadcast_int(len(steps)))


def _resume(
    program: Program, checkpoints: Checkpoints, console: Console, permissions: Permissions, *, initialized: bool
) -> tuple[State, int]:
    """Return the state of the newest whole checkpoint, and the number of updates done.

    Without one, the run starts from scratch, at step 0; its state is then initialized unless it already is.

    Raises:
        UserError: all checkpoints are damaged, or the newest one cannot be read now.
    """
    for step, aside in checkpoints.moved.items():
        _warn(console, f"checkpoint {step} is damaged ({INVALID_METADATA}); it lies in {aside} now")
    while (newest := checkpoints.newest()) is not None:
        state, problem = None, ""
        try:
            state = program.restore_state(partial(checkpoints.restore, newest))
        except DamagedCheckpointError as error:
            problem = error.reason
        if group.all_agree(state is not None) and state is not None:
            console.print(f"resuming after step {newest:,}", highlight=False)
            return state, newest
        aside = checkpoints.move_aside(newest)
        _warn(console, f"checkpoint {newest} is damaged ({problem}); it lies in {aside} now")
    if not permissions.from_scratch:
        checkpoints.check_nothing_lost()
    checkpoints.forget()
    return (program if initialized else initialize(program)[0]).init_state(), 0


def _forecast_step(program: Program) -> Forecast | None:
    """Return the forecast of the plan's step, for known kinds of chips."""
    if chips.find_chip(program.plan.pod.kind) is None:
        return None
    return make_forecast(program.plan, count_model_work(program.plan.recipe, program.net, *program.weights))


def _warn(console: Console, text: str) -> None:
    if group.is_main_process():
        console.print(f"warning: {text}", style="bold red", markup=False, highlight=False)
