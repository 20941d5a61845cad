"""The training loop: a recipe on a pod becomes a trained model in a run's folder. Read it from top to bottom.

`train` runs sessions until one ends without a rollback. `run_training` is the loop of Ying et al. 2018 (arXiv
1811.06992): load, update, evaluate, save. How a session starts is in `session.py`; what is printed and written is up to
the reporters, to which the loop emits events.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Unpack

import numpy as np
from flax import nnx

from podscale import pod as pods
from podscale.config.json_types import JsonObject
from podscale.config.options import Options, check_options
from podscale.config.stop_condition import StopCondition
from podscale.errors import PreemptedError, SavedInterruptError, UserError
from podscale.pod import Pod
from podscale.processes import group, heartbeat
from podscale.processes.garbage import pause_collection
from podscale.recipe import Recipe
from podscale.runs.bucket import resolve_folder
from podscale.runs.folder import Run
from podscale.training.checkpoint.checkpoints import CheckpointNotSavedError, LastCheckpointNotSavedError
from podscale.training.checkpoint.last import save_last
from podscale.training.compilation import compile_train_step
from podscale.training.divergence import RolledBackError, handle_divergence, read_skipped_batches
from podscale.training.evaluate import Evaluator
from podscale.training.guard import Guard
from podscale.training.initial_weights import check_source
from podscale.training.nonfinite import DivergenceError
from podscale.training.out_of_memory import explain_out_of_memory
from podscale.training.preemption import StopRequest
from podscale.training.replicas import ReplicaMismatchError
from podscale.training.reporters import make, trackers
from podscale.training.session import OpenRun, Request, Settings, SettingsDict, open_session, warn
from podscale.training.setup import load_train_batches
from podscale.training.snapshots import Snapshots, run_generations
from podscale.training.step import State

SHARED_ERRORS = (
    PreemptedError,
    SavedInterruptError,
    ReplicaMismatchError,
    DivergenceError,
    LastCheckpointNotSavedError,
)
MAX_ROLLBACKS = 3  # to the last checkpoint, after replicas differed


def train(
    recipe: Recipe,
    *,
    pod: Pod | Callable[[], Pod] | None = None,
    options: Options = Options(),
    model: nnx.Module | None = None,
    folder: str | Path | None = None,
    until: StopCondition | None = None,
    **settings: Unpack[SettingsDict],
) -> JsonObject:
    """Train a recipe, or resume its run, and return the summary.

    Args:
        recipe: what to train.
        pod: the devices to train on, or a function that finds them; all devices of this machine by default.
        options: how to run it.
        model: a flax.nnx module from images [n, h, w, 3] to logits [n, classes], instead of the recipe's own. Its
            `nnx.Dropout` layers are replaced by keyed ones; another random layer derives from `RandomLayer`, because
            with random state of its own it would learn something else on every pod.
        folder: the run's folder. The default belongs to the recipe, so that the same call resumes the run.
        until: stop at the first evaluation that meets this condition.
        **settings: any of
            console: where progress is printed; track: trackers besides TensorBoard, such as "wandb";
            callbacks: reporters of events (`podscale.runs.events`); one that returns True at an evaluation stops;
            allow_changed: what may differ from the run in `folder`: "recipe", "data" or "versions" (of libraries);
            from_scratch: start at step 0 if the run had checkpoints and none of them is left.

    Returns:
        The summary that `summary.json` in the run's folder holds: steps, accuracy, times and more.

    Raises:
        UserError: the recipe cannot be trained like this; the message says what to change.
        PreemptedError: SIGTERM was received; the state is saved, and the same call resumes.
        KeyboardInterrupt: Ctrl-C; the state is saved as well, unless it was pressed twice.
        DivergedError: loss or gradient were not finite again and again; the run's folder says more.

    Examples:
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
    others = Settings(**settings)
    check_options(options)
    trackers.check_trackers(others.track)
    make.check_callbacks(others.callbacks)
    check_source(recipe.model.init)
    folder = resolve_folder(folder) if folder else Run.default_folder(recipe, model)
    Run.check(folder, recipe, others.allow_changed)
    find_pod = pod if callable(pod) else partial(_return_pod, pod) if pod else pods.find_pod
    request = Request(recipe, find_pod, options, model, folder, until, others, Snapshots())
    return run_generations(partial(_run_sessions, request), request.snapshots)


def _return_pod(pod: Pod) -> Pod:
    return pod


def _run_sessions(request: Request) -> JsonObject:
    """Run sessions until one ends without a rollback."""
    rollbacks = 0
    while True:
        try:
            with explain_out_of_memory():
                return _run_session(request)
        except ReplicaMismatchError as error:
            rollbacks += 1
            if rollbacks > MAX_ROLLBACKS:
                raise UserError(f"{error}, again after a rollback; have that device replaced") from None
            warn(request.console, f"{error}; rolling back to the last checkpoint")
        except RolledBackError as error:
            warn(request.console, str(error))
        request.snapshots.clear()


def _run_session(request: Request) -> JsonObject:
    """Train from the newest checkpoint to the end of the plan, or to a fault."""
    with open_session(request) as run:
        steps = run.program.plan.steps
        if run.start >= steps or run.accounts.is_target_reached():
            excess = f": after step {run.start:,}, and the recipe has {steps:,}" if run.start > steps else ""
            message = f"{run.events.run.where} is already finished{excess}"
            run.console.print(message, highlight=False, markup=False)
            if run.events.run.summary().get("steps") == run.start:
                return run.accounts.load_past_summary()
            run.events.report_end(run.start)  # killed after its last checkpoint: a summary is that of an earlier end
            run.accounts.ensure_summary()
            return run.accounts.summary
        try:
            with StopRequest(run.start) as stop, heartbeat.fail_together(*SHARED_ERRORS):
                run.events.report_end(run_training(run, run.take_state(), stop))
        except LastCheckpointNotSavedError as error:
            run.events.report_end(error.step)
            error.summary |= run.accounts.summary
            raise
        except DivergenceError as error:
            raise handle_divergence(error, run.program, run.events.run, run.checkpoints) from None
        run.accounts.ensure_summary()
        return run.accounts.summary


def run_training(run: OpenRun, state: State, stop: StopRequest) -> int:
    """Train from `run.start` to the end of the plan, a target, or a request to stop; return the last step.

    One iteration is one compiled call of several updates. Evaluation and saving happen only at the steps that the plan
    fixes, so that a resumed run goes through the same calls as one that never stopped.

    Raises:
        PreemptedError: a stop was requested; the state is saved. Ctrl-C is a KeyboardInterrupt.
        ReplicaMismatchError: devices no longer hold the same state.
        DivergenceError: too many consecutive updates were non-finite.
    """
    program, plan, events, checkpoints = run.program, run.program.plan, run.events, run.checkpoints
    calls, eval_steps, save_steps = plan.calls(run.start), set(plan.eval_steps()), plan.save_points()
    with events.phase("compile"), run.console.status("compiling"), pause_collection():
        evaluate = Evaluator(program, events.run)  # compiled in a thread, while this one compiles the train step
        try:
            train_step = compile_train_step(program, events.run, traced=run.traced)
        finally:
            evaluate.wait_for_compiler()
    with load_train_batches(program, calls, read_skipped_batches(events.run.folder)) as batches, Guard(run) as guard:
        events.report_start(run.start)
        for number, call in enumerate(calls):
            guard.watch(call, "load, train")
            with events.phase("input wait"):  # the paper's input pipeline: hosts prefetch what each device needs next
                batch = next(batches)
            with events.phase("train"):  # distributed batch norm, 2-D gradient summation and LARS, all in one program
                state, metrics = train_step(state, batch.images, batch.labels, np.int32(batch.count))
                events.report_call(call, metrics)
            events.report_bad_images(call.stop, batches.bad_images.pop_messages())
            stopping = stop.is_requested(number)
            saving = call.stop in save_steps or stopping
            guard.check(call, state, metrics, saving=saving)
            if not saving:
                continue
            accuracy = None
            if call.stop in eval_steps:  # the paper's distributed evaluation: on all devices, inside the loop
                with events.phase("evaluate"):
                    result = evaluate(state)
                accuracy = result["accuracy"]
                events.report_bad_images(call.stop, evaluate.unreadable_images)
                events.report_evaluation(call.stop, result, evaluate.predictions, program.data.val)
            with events.phase("checkpoint"), events.tolerate(CheckpointNotSavedError):
                checkpoints.save(call.stop, program.to_checkpoint(state), accuracy)
            events.report_checkpoint(call.stop)
            if events.is_stop_requested():
                break
            if stopping and call.stop < plan.steps:
                with events.phase("checkpoint"), events.tolerate(CheckpointNotSavedError):
                    checkpoints.wait()
                raise stop.make_error(call.stop, group.broadcast_int(checkpoints.newest() or 0))
        with events.phase("checkpoint"):
            save = partial(checkpoints.save, call.stop, program.to_checkpoint(state), accuracy)
            progress = partial(guard.watch, call, "save the last state")
            save_last(save, call.stop, checkpoints, events, map(stop.is_requested, count(number + 1)), progress)
    return call.stop
