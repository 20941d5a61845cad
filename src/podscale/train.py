"""The train-and-evaluate loop: recipe + pod -> a trained model in a run folder. Read it from top to bottom."""

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from PIL import Image
from rich.console import Console

from podscale import pod as pods
from podscale.checkpoint import Checkpoints
from podscale.data import loader
from podscale.forecast import chips
from podscale.forecast.compute import work_in
from podscale.forecast.model import Forecast, forecast
from podscale.job import Evaluator, Job, cached, compiled_step, input_facts, prepare, train_batches
from podscale.options import Options
from podscale.pod import Pod
from podscale.recipe import Recipe
from podscale.report.words import table
from podscale.run import Run
from podscale.telemetry import Ledger, Teller, scanning
from podscale.until import Until


def train(
    recipe: Recipe,
    *,
    pod: Pod | None = None,
    options: Options = Options(),
    model: nnx.Module | None = None,
    folder: str | Path | None = None,
    until: Until | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains `recipe` on `pod` (default: all devices there are), or resumes, and returns the summary.

    `model` is a flax.nnx module that maps images [n, h, w, 3] to logits [n, classes], instead of the recipe's own; one
    with random state of its own, such as dropout, is refused, because it would learn something else on every pod.
    The run is in `folder`: by default one that belongs to the recipe, so that the same call resumes.
    """
    ledger = Ledger()
    folder = Path(folder) if folder else Run.default_folder(recipe, model)
    Run.check(folder, recipe)
    with ledger.measure("start"):
        pod = pod or pods.find()
        console = (console or Console()) if pods.speaks() else Console(quiet=True)
        with scanning(console) as progress:
            job = prepare(recipe, pod, options, model, progress)
        job = cached(job, options)
        run = _opened(job, folder)
    facts = input_facts(job)
    console.print(table("plan", [*job.plan.rows(), *_decoding(facts)]))
    with Checkpoints(run.checkpoints, job.plan.keep, about=facts) as checkpoints:
        with ledger.measure("restore"):
            job, start = _resumed(job, checkpoints, console)
        teller = Teller(run, job.plan, ledger, console, start, until, _forecast(job))
        if start == job.plan.steps or teller.reached():
            console.print(f"{run.folder} has already come to its end", highlight=False, markup=False)
            return teller.past_summary()
        try:
            return _train_from(start, job, checkpoints, teller)
        finally:
            teller.close()


def _forecast(job: Job) -> Forecast | None:
    """What the plan's step should take, for kinds of chips that are known."""
    if chips.known(job.plan.pod.kind) is None:
        return None
    return forecast(job.plan, work_in(job.recipe, job.net, job.state.params, job.state.stats))


def _opened(job: Job, folder: Path) -> Run:
    """The run's folder, which the first process fills; if it cannot, all of them end."""

    def fill() -> None:
        Run.create(folder, job.recipe, job.plan.to_dict() | {"input": input_facts(job)}, job.data.classes)
        Image.fromarray(loader.eval_pictures(job.data.val, [0], job.recipe)[0]).save(folder / "sample.png")

    pods.by_the_first(fill)
    return Run(folder, job.recipe)


def _decoding(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The plan's row about pictures in files."""
    if facts["decoder"] == "none":
        return []
    kept = ", ".join(f"{split} {kind}" for split, kind in facts["cache"].items() if kind != "none")
    memory = f"kept in memory: {kept} ({facts['cache_bytes'] / 2**30:.2f} GiB)" if kept else "nothing kept in memory"
    return [("decoder", f"{facts['decoder']}; {memory}")]


def _resumed(job: Job, checkpoints: Checkpoints, console: Console) -> tuple[Job, int]:
    """The job with the newest checkpoint's state, and the number of updates done."""
    newest = checkpoints.newest()
    if newest is None:
        return job, 0
    console.print(f"resuming after step {newest:,}", highlight=False)
    return job._replace(state=checkpoints.restore(newest, job.state)), newest


def _train_from(start: int, job: Job, checkpoints: Checkpoints, teller: Teller) -> dict[str, Any]:
    """The loop: load, update, tell, evaluate, save."""
    plan, state, ledger = job.plan, job.state, teller.ledger
    calls, evals, saves = plan.calls(start), set(plan.eval_steps()), plan.save_points()
    with ledger.measure("compile"), teller.console.status("compiling"):
        call, evaluate = compiled_step(job, teller.run), Evaluator(job, teller.run)
    with train_batches(job, calls) as batches:
        teller.begin()
        for done in calls:
            with ledger.measure("input wait"):
                batch = next(batches)
            with ledger.measure("train"):
                state, metrics = call(state, batch.images, batch.labels, np.int32(batch.count))
                teller.trained(done, metrics)
            if done.stop not in saves:
                continue
            with ledger.measure("train"):
                teller.catch_up()
            accuracy = None
            if done.stop in evals:
                with ledger.measure("evaluate"):
                    found = evaluate(state)
                accuracy = found["accuracy"]
                teller.evaluated(done.stop, found)
            with ledger.measure("checkpoint"):
                checkpoints.save(done.stop, state, accuracy)
            teller.resume_clock()
            if teller.reached():
                break
    with ledger.measure("checkpoint"):
        checkpoints.wait()
    return teller.summary(done.stop)


class _Verb(types.ModuleType):
    """`podscale.train` is the room and the verb: calling the module trains."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
