"""The train-and-evaluate loop: recipe + pod -> a trained model in a run folder. Read it from top to bottom."""

import json
import math
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
from podscale.config.stop_condition import Until
from podscale.data import loader
from podscale.errors import PreemptedError, UserError
from podscale.forecast import chips, choice
from podscale.forecast.compute import work_in
from podscale.forecast.model import Forecast, forecast
from podscale.models.weights.names import digest_file
from podscale.pod import Pod
from podscale.processes import group, heartbeat
from podscale.processes.stragglers import Stragglers
from podscale.processes.watchdog import Watchdog
from podscale.recipe import Recipe
from podscale.report.counter import counting
from podscale.report.terminal import table
from podscale.runs import environment
from podscale.runs.environment import library_versions
from podscale.runs.events import Callback
from podscale.runs.folder import Run
from podscale.runs.ledger import PhaseTimer
from podscale.storage.files import write_atomically
from podscale.storage.lock import FolderLock
from podscale.training.checkpoint import Checkpoints, DamagedError, NotSavedError
from podscale.training.compilation import compile_train_step
from podscale.training.divergence import WentBackError, answered, kept, left_out
from podscale.training.evaluate import Evaluator
from podscale.training.initial_weights import Beginning
from podscale.training.nonfinite import DivergenceError
from podscale.training.out_of_memory import explain_out_of_memory
from podscale.training.preemption import StopRequest
from podscale.training.replicas import ReplicaCheck, ReplicaMismatchError
from podscale.training.reporters import trackers
from podscale.training.reporters.reporter import Reporter
from podscale.training.setup import Job, begun, cached, fitted, input_facts, prepare, restored, saveable, train_batches

TRY_AGAIN_S = 2.0  # between attempts to save the last state
MOST_RETURNS = 3  # to the last checkpoint, after replicas differed


def train(
    recipe: Recipe,
    *,
    pod: Pod | None = None,
    options: Options = Options(),
    model: nnx.Module | None = None,
    folder: str | Path | None = None,
    until: Until | None = None,
    console: Console | None = None,
    allow_changed: Collection[str] = (),
    callbacks: Sequence[Callback] = (),
    track: Collection[str] = (),
) -> dict[str, Any]:
    """Trains `recipe` on `pod` (default: all devices there are), or resumes, and returns the summary.

    `model` is a flax.nnx module that maps images [n, h, w, 3] to logits [n, classes], instead of the recipe's own; one
    with random state of its own, such as dropout, is refused, because it would learn something else on every pod.
    The run is in `folder`: by default one that belongs to the recipe, so that the same call resumes. If its "recipe",
    "data" or "versions" (of libraries) have changed since, it does so only where `allow_changed` names them.
    `callbacks` hear of every event (see `podscale.runs.events`), `track` names trackers besides TensorBoard.
    """
    trackers.check(track)
    folder = Path(folder) if folder else Run.default_folder(recipe, model)
    Run.check(folder, recipe, allow_changed)
    pod, console, returns = pod or pods.find(), console or Console(force_jupyter=False), 0
    listeners = Listeners(callbacks, track)
    while True:
        try:
            with explain_out_of_memory():
                return _session(recipe, pod, options, model, folder, until, console, allow_changed, listeners)
        except ReplicaMismatchError as error:
            returns += 1
            if returns > MOST_RETURNS:
                raise UserError(f"{error}, and not for the first time; have that device looked after") from None
            _warn(console, f"{error}; going back to the last checkpoint")
        except WentBackError as error:
            _warn(console, str(error))


class Listeners(NamedTuple):
    """Who hears of what happens."""

    callbacks: Sequence[Callback]
    track: Collection[str]


def _session(
    recipe: Recipe,
    pod: Pod,
    options: Options,
    model: nnx.Module | None,
    folder: Path,
    until: Until | None,
    console: Console,
    allow_changed: Collection[str],
    listeners: "Listeners",
) -> dict[str, Any]:
    """From the newest checkpoint to the end, or to a fault."""
    ledger = PhaseTimer()
    with ledger.measure("start"):
        console = console if group.is_main_process() else Console(quiet=True)
        options = choice.as_before(options, pod, Run.plan_in(folder))
        with counting(console, "indexing") as progress:
            job = prepare(recipe, pod, options, model, progress)
        job, beginning = _begun(fitted(cached(job, options)), folder)
        facts, claim = input_facts(job), FolderLock(folder)
        run = _opened(job, beginning, claim, facts, folder, allow_changed)
    console.print(table("plan", [*job.plan.rows(), *choice.told(job.choice), *_decoding(facts)]))
    if beginning:
        console.print(beginning.told(), highlight=False, markup=False)
    with claim, Checkpoints(run.checkpoints, kept(job.plan), about=facts) as checkpoints:
        with ledger.measure("restore"):
            job, start = _resumed(job, beginning, checkpoints, console)
        teller = Reporter(run, job.plan, ledger, console, start, until, _forecast(job), *listeners)
        if start == job.plan.steps or teller.reached():
            console.print(f"{run.folder} has already come to its end", highlight=False, markup=False)
            return teller.past_summary()
        try:
            with StopRequest() as stop, heartbeat.together(PreemptedError, ReplicaMismatchError, DivergenceError):
                return _train_from(start, job, checkpoints, teller, stop)
        except DivergenceError as error:
            raise answered(error, job, run, checkpoints) from None
        finally:
            teller.close()


def _begun(job: Job, folder: Path) -> tuple[Job, Beginning | None]:
    """The job with the weights that its recipe begins from; they are not read again once there is a checkpoint."""
    if not job.recipe.model.init or Run(folder, job.recipe).has_checkpoints():
        return job, None
    return begun(job)


def _forecast(job: Job) -> Forecast | None:
    """What the plan's step should take, for kinds of chips that are known."""
    if chips.known(job.plan.pod.kind) is None:
        return None
    return forecast(job.plan, work_in(job.recipe, job.net, job.state.params, job.state.stats))


def _opened(
    job: Job,
    beginning: Beginning | None,
    claim: FolderLock,
    facts: dict[str, Any],
    folder: Path,
    allowed: Collection[str],
) -> Run:
    """The run's folder, which the first process claims and fills; if it cannot, all of them end."""

    def fill() -> None:
        if "recipe" not in allowed:
            Run.check_init(folder, beginning.digest if beginning else digest_file(job.recipe.model.init))
        claim.take()
        told = {"input": facts, "data_digest": job.data.digest(), "versions": library_versions()}
        told |= {"summations_s": job.choice.predicted} if job.choice.predicted else {}
        told["environment"] = environment.facts(list(job.mesh.devices.flat))
        Run.create(folder, job.recipe, job.plan.to_dict() | told, job.data.classes, allowed)
        if beginning:
            write_atomically(folder / "init.json", json.dumps(beginning.to_dict(), indent=1))
        Image.fromarray(loader.eval_pictures(job.data.val, [0], job.recipe)[0]).save(folder / "sample.png")

    group.run_on_main_process(fill)
    return Run(folder, job.recipe)


def _decoding(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The plan's row about pictures in files."""
    if facts["decoder"] == "none":
        return []
    kept = ", ".join(f"{split} {kind}" for split, kind in facts["cache"].items() if kind != "none")
    memory = f"kept in memory: {kept} ({facts['cache_bytes'] / 2**30:.2f} GiB)" if kept else "nothing kept in memory"
    return [("decoder", f"{facts['decoder']}; {memory}")]


def _warn(console: Console, text: str) -> None:
    if group.is_main_process():
        console.print(f"warning: {text}", style="bold red", markup=False, highlight=False)


def _resumed(job: Job, beginning: Beginning | None, checkpoints: Checkpoints, console: Console) -> tuple[Job, int]:
    """The job with the newest whole checkpoint's state, and the number of updates done."""
    while (newest := checkpoints.newest()) is not None:
        try:
            state, why = restored(job, partial(checkpoints.restore, newest)), ""
        except DamagedError as error:
            state, why = job.state, error.why
        if group.all_agree(not why):
            console.print(f"resuming after step {newest:,}", highlight=False)
            return job._replace(state=state), newest
        aside = checkpoints.set_aside(newest)
        _warn(console, f"checkpoint {newest} is damaged ({why}); it lies in {aside} now")
    if job.recipe.model.init and not beginning:  # there were checkpoints, but none of them was whole
        job, beginning = begun(job)
    return job, 0


def _train_from(start: int, job: Job, checkpoints: Checkpoints, teller: Reporter, stop: StopRequest) -> dict[str, Any]:
    """The loop: load, update, tell, evaluate, save. It ends where training does, or where it is asked to stop."""
    plan, state, ledger = job.plan, job.state, teller.ledger
    replicas = ReplicaCheck(job.mesh, plan.check_steps)
    calls, evals, saves = plan.calls(start), set(plan.eval_steps()), plan.save_points()
    with ledger.measure("compile"), teller.console.status("compiling"):
        call, evaluate, stragglers = compile_train_step(job, teller.run), Evaluator(job, teller.run), Stragglers()
    data, watchdog = train_batches(job, calls, left_out(teller.run.folder)), Watchdog(plan.timeout_s, teller.run.folder)
    with data as batches, watchdog, stragglers:
        teller.begin()
        for number, done in enumerate(calls):
            watchdog.passed(done.start, "load, train")
            with ledger.measure("input wait"):
                batch = next(batches)
            teller.met(batches.bad.news())
            with ledger.measure("train"):
                state, metrics = call(state, batch.images, batch.labels, np.int32(batch.count))
                teller.trained(done, metrics)
            stragglers.passed(ledger.seconds["input wait"], metrics)
            teller.held_up(done.stop, stragglers.news())
            asked = stop.after(number)
            saving = done.stop in saves or asked
            if saving:
                with ledger.measure("train"):
                    teller.catch_up()
            with ledger.measure("check"):
                replicas.check(done.stop, state, now=saving)
            teller.streak.check(state)
            if not saving:
                continue
            watchdog.passed(done.start, "train, evaluate, save")
            accuracy = None
            if done.stop in evals:
                with ledger.measure("evaluate"):
                    found = evaluate(state)
                accuracy = found["accuracy"]
                teller.met(evaluate.unreadable)
                teller.evaluated(done.stop, found, evaluate.answers, job.data.val)
            with ledger.measure("checkpoint"), teller.bearing(NotSavedError):
                checkpoints.save(done.stop, saveable(job, state), accuracy)
            teller.saved(done.stop)
            teller.resume_clock()
            if teller.reached():
                break
            if asked and done.stop < plan.steps:
                with ledger.measure("checkpoint"), teller.bearing(NotSavedError):
                    checkpoints.wait()
                raise PreemptedError(done.stop)
    with ledger.measure("checkpoint"):
        save = partial(checkpoints.save, done.stop, saveable(job, state), accuracy)
        _keep_last(save, done.stop, checkpoints, teller, asked=map(stop.after, count(number + 1)))
    return teller.summary(done.stop)


def _keep_last(
    save: Callable[[], None], step: int, checkpoints: Checkpoints, teller: Reporter, asked: Iterator[bool]
) -> None:
    """Returns once the state after the last step is on disk.

    A full disk is waited for, as long as for a stuck run, or until the run is `asked` to stop.
    """
    limit_s = teller.plan.timeout_s or math.inf
    began = time.monotonic()
    while True:
        with teller.bearing(NotSavedError):
            checkpoints.wait()
        waited_s = time.monotonic() - began
        verdict = group.broadcast_int(2 * checkpoints.holds(step) + (waited_s > limit_s))
        if verdict > 1:
            return
        if verdict or next(asked):
            raise UserError(
                f"{teller.run.folder} had no room for the last checkpoint in {waited_s:.0f} s; make room and give the "
                f"same command again: it goes on after step {checkpoints.newest() or 0}"
            )
        time.sleep(TRY_AGAIN_S)
        with teller.bearing(NotSavedError):
            save()
