"""Start a session of a run: prepare the program, open the run's folder, resume from the newest whole checkpoint."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

from flax import nnx
from PIL import Image
from rich.console import Console

from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.config.stop_condition import StopCondition
from podscale.data import loader
from podscale.errors import UserError
from podscale.forecast import chips, choice
from podscale.forecast.compute import count_model_work
from podscale.forecast.model import Forecast, make_forecast
from podscale.models import registry
from podscale.models.weights.names import digest_file
from podscale.pod import Pod
from podscale.processes import group
from podscale.processes.elastic.membership import get_membership
from podscale.processes.garbage import pause_collection
from podscale.recipe import Recipe
from podscale.report.counter import show_progress
from podscale.report.notebook import is_notebook
from podscale.report.terminal import make_table
from podscale.runs import environment
from podscale.runs.bucket import BucketRunLock, find_bucket, open_lock
from podscale.runs.events import Callback
from podscale.runs.folder import Run
from podscale.runs.ledger import PhaseTimer
from podscale.runs.startup import clock as start_clock
from podscale.storage.files import write_atomically
from podscale.storage.lock import FolderLock
from podscale.training.advice import describe_decoding, list_warnings
from podscale.training.checkpoint.checkpoints import Checkpoints, DamagedCheckpointError
from podscale.training.checkpoint.store import open_checkpoint_store
from podscale.training.compilation import TracedCalls, trace_in_advance
from podscale.training.divergence import (
    check_skipped_batches,
    count_checkpoints_to_keep,
    describe_skipped_batches,
    read_skipped_batches,
)
from podscale.training.initial_weights import InitialWeights
from podscale.training.memory import check_memory
from podscale.training.nonfinite import NonfiniteCounter
from podscale.training.program import Program
from podscale.training.reporters.accounts import Accounts, Session
from podscale.training.reporters.emitter import Emitter
from podscale.training.reporters.make import subscribe_reporters
from podscale.training.reporters.progress import print_warning
from podscale.training.setup import cache_images, describe_input, initialize, prepare
from podscale.training.snapshots import Snapshots, report_sizes
from podscale.training.step import State

Facts = JsonObject  # where pixels come from; see `setup.describe_input`


@dataclass(frozen=True)
class Settings:
    """How a training is reported, and what a resumed run may do; see `loop.train`."""

    console: Console | None = None
    callbacks: Sequence[Callback] = ()
    track: Collection[str] = ()
    allow_changed: Collection[str] = ()
    from_scratch: bool = False


class SettingsDict(TypedDict, total=False):
    """The keyword arguments of `loop.train` that are `Settings`."""

    console: Console | None
    callbacks: Sequence[Callback]
    track: Collection[str]
    allow_changed: Collection[str]
    from_scratch: bool


@dataclass(frozen=True)
class Request:
    """What `loop.train` is asked to do."""

    recipe: Recipe
    find_pod: Callable[[], Pod]
    options: Options
    model: nnx.Module | None
    folder: Path
    until: StopCondition | None
    settings: Settings
    snapshots: Snapshots

    @property
    def console(self) -> Console:
        """Where progress is printed."""
        plain = False if is_notebook() else None  # a kernel says that it is a terminal, but cannot move a cursor
        return self.settings.console or Console(force_jupyter=False, force_terminal=plain)


@dataclass
class OpenRun:
    """A run that is ready to train.

    Attributes:
        program: what it computes with.
        start: the step that it starts from.
        checkpoints: its checkpoints.
        events: where the loop reports.
        accounts: the result.
        nonfinite: counts non-finite updates.
        console: where this process prints; muted except in the main process.
        snapshots: the state in host memory, in elastic runs.
        traced: the train calls that are traced already; None: none are.
    """

    program: Program
    start: int
    checkpoints: Checkpoints
    events: Emitter
    accounts: Accounts
    nonfinite: NonfiniteCounter
    console: Console
    snapshots: Snapshots
    traced: TracedCalls | None
    _state: State | None

    def take_state(self) -> State:
        """Return the state to start from; the first update reuses its memory, so nothing else may hold it."""
        state, self._state = self._state, None
        assert state is not None
        return state


@contextmanager
def open_session(request: Request) -> Iterator[OpenRun]:
    """Prepare, open, resume and report; close everything in the end.

    Raises:
        UserError: the recipe cannot be trained like this, or the run cannot be resumed.
    """
    settings, ledger = request.settings, PhaseTimer(start_clock.begin_session())
    console = request.console if group.is_main_process() else Console(quiet=True)
    with ledger.measure("start"), pause_collection():
        program, weights, is_new = _prepare_program(request, console)
        facts, lock = describe_input(program), open_lock(request.folder)
        start_clock.mark("model")
        run = _open_folder(program, weights, lock, facts, request)
        start_clock.mark("folder")
    _show_plan(program, weights, facts, console)
    for message in list_warnings(program, facts, is_new=is_new):
        warn(console, message)
    keep = count_checkpoints_to_keep(program.plan)
    skipped = read_skipped_batches(run.folder)
    about = facts | ({"left_out": describe_skipped_batches(skipped)} if skipped else {})
    with (
        lock,
        Checkpoints(run.checkpoints, keep, about=about, check_owner=lock.check) as checkpoints,
        trace_in_advance(program, is_used=is_new) as traced,
    ):
        with ledger.measure("restore"), pause_collection():
            if request.snapshots.find_step() >= 0:
                state, start = request.snapshots.restore(program)
                console.print(f"resuming after step {start:,}", highlight=False)
            else:
                state, start = resume(program, checkpoints, console, settings, initialized=is_new)
                check_skipped_batches(run.folder, start, checkpoints.read_about(start) if start else None)
        session = Session(run, program.plan, ledger, start, request.until, _forecast_step(program))
        past = session.read_past()
        accounts = Accounts(session, past)
        nonfinite = NonfiniteCounter(program.plan.recipe.train.bad_updates, past)
        events = Emitter(run, program.plan, ledger, accounts.earlier_s)
        events.subscribe(nonfinite)
        events.subscribe(accounts, writes=True)
        subscribe_reporters(events, session, console, settings.callbacks, settings.track)
        shown = console, request.snapshots
        opened = OpenRun(program, start, checkpoints, events, accounts, nonfinite, *shown, traced, state)
        del state  # only the loop may hold it
        try:
            yield opened
        finally:
            events.close()


def _prepare_program(request: Request, console: Console) -> tuple[Program, InitialWeights | None, bool]:
    """Return the program, where its weights come from, if not random, and whether the run has no checkpoint yet."""
    recipe, pod, folder = request.recipe, request.find_pod(), request.folder
    options = choice.reuse_choice(request.options, pod, Run.read_plan(folder))
    with show_progress(console, "indexing") as progress:
        program = prepare(recipe, pod, options, request.model, progress)
    check_memory(program.plan)
    report_sizes(program.plan, request.options)
    program = cache_images(program)
    if request.snapshots.find_step() >= 0 or _has_checkpoints(Run(folder, recipe), request.settings):
        return program, None, False
    return *initialize(program), True


def _has_checkpoints(run: Run, settings: Settings) -> bool:
    """Return whether there is a checkpoint, whole or not, as the main process sees it.

    Raises:
        UserError: the folder cannot be read, or there was a checkpoint and none is left.
    """
    steps: list[int] = []
    find = partial(open_checkpoint_store(run.checkpoints).find_steps, allow_lost=settings.from_scratch)
    group.run_on_main_process(lambda: steps.extend(find()))
    return bool(group.broadcast_int(len(steps)))


def _open_folder(
    program: Program, weights: InitialWeights | None, lock: FolderLock | BucketRunLock, facts: Facts, request: Request
) -> Run:
    """Lock and fill the run's folder, which the main process does; if it cannot, all processes end."""
    folder, recipe, allowed = request.folder, program.plan.recipe, request.settings.allow_changed

    def fill() -> None:
        if "recipe" not in allowed:
            Run.check_init(folder, weights.digest if weights else digest_file(recipe.model.init))
        lock.acquire()
        details = {
            "input": facts,
            "data_digest": program.data.digest(),
            "versions": environment.list_library_versions(),
        }
        details |= {"summations_s": program.choice.predicted} if program.choice.predicted else {}
        details["model_source"] = registry.locate_builder(recipe.model.name)
        details["environment"] = environment.describe_machine(list(program.mesh.devices.flat))
        Run.create(folder, recipe, program.plan.to_dict() | details, program.data.classes, allowed)
        if weights:
            write_atomically(folder / "init.json", json.dumps(weights.to_dict(), indent=1))
        Image.fromarray(loader.load_eval_images(program.data.val, [0], recipe)[0]).save(folder / "sample.png")
        if bucket:
            bucket.push()

    bucket = find_bucket(folder)
    if bucket and get_membership():
        raise UserError("an elastic run keeps its folder on this machine: give --run a local folder, not a bucket")
    group.run_on_main_process(fill)
    if bucket and not group.is_main_process():
        bucket.pull()
    return Run(folder, recipe)


def resume(
    program: Program, checkpoints: Checkpoints, console: Console, settings: Settings, *, initialized: bool
) -> tuple[State, int]:
    """Return the state of the newest whole checkpoint, and the number of updates done.

    Without one, the run starts from scratch, at step 0; its weights are then initialized unless they already are.

    Raises:
        UserError: all checkpoints are damaged, or the newest one cannot be read now.
    """
    for step, aside in checkpoints.moved.items():
        warn(console, f"checkpoint {step} is damaged ({checkpoints.reasons[step]}); it was moved to {aside}")
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
        problem = problem or "another process does not read what was saved"
        warn(console, f"checkpoint {newest} is damaged ({problem}); it was moved to {aside}")
    if not settings.from_scratch:
        checkpoints.check_nothing_lost()
    checkpoints.forget()
    return (program if initialized else initialize(program)[0]).init_state(), 0


def _forecast_step(program: Program) -> Forecast | None:
    """Return the forecast of the plan's step, for known kinds of chips."""
    if chips.find_chip(program.plan.pod.kind) is None:
        return None
    return make_forecast(program.plan, count_model_work(program.plan.recipe, program.net, *program.weights))


# --- text ------------------------------------------------------------------------------------------------------------


def _show_plan(program: Program, weights: InitialWeights | None, facts: Facts, console: Console) -> None:
    rows = [*program.plan.rows(), *choice.format_rows(program.choice), *describe_decoding(facts)]
    console.print(make_table("plan", rows))
    if weights:
        console.print(weights.describe(), highlight=False, markup=False)


def warn(console: Console, message: str) -> None:
    """Print a warning in the main process."""
    if group.is_main_process():
        print_warning(console, message)
