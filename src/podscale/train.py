"""The train-and-evaluate loop: recipe + pod -> a trained model in a run folder. Read it from top to bottom."""

import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image
from rich.console import Console

from podscale import models, optim
from podscale import plan as plans
from podscale import pod as pods
from podscale import step as steps
from podscale.checkpoint import Checkpoints
from podscale.data import loader, order
from podscale.data.index import Splits, open_index
from podscale.errors import UserError
from podscale.memory import footprint
from podscale.models.functional import Functional, functional
from podscale.options import Options
from podscale.plan import Counts, Plan
from podscale.pod import Pod
from podscale.recipe import Recipe
from podscale.report import page
from podscale.run import Run, to_json, write_atomically
from podscale.step import State
from podscale.telemetry import Display, Journal, Ledger, table


@dataclass(frozen=True)
class Until:
    """Training stops at the first evaluation whose `metric` reaches `value`."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "Until":
        """From "accuracy=0.763"."""
        metric, _, value = text.partition("=")
        try:
            return cls({"accuracy": "accuracy", "top5": "accuracy_top5"}[metric], float(value))
        except (KeyError, ValueError):
            raise UserError(f"--until takes accuracy=NUMBER or top5=NUMBER, not {text!r}") from None


class Job(NamedTuple):
    """A recipe on a pod, with everything that the loop needs."""

    recipe: Recipe
    plan: Plan
    mesh: Mesh
    data: Splits
    net: Functional
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    state: State


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

    `model` is any flax.nnx module that maps images [n, h, w, 3] to logits [n, classes], instead of the recipe's own.
    The run is in `folder`: by default one that belongs to the recipe, so that the same call resumes.
    """
    ledger, console = Ledger(), console or Console()
    folder = Path(folder) if folder else Run.default_folder(recipe)
    Run.check(folder, recipe)
    with ledger.measure("start"):
        job = prepare(recipe, pod or pods.find(), options, model)
    speaks = jax.process_index() == 0
    if speaks:
        console.print(table("plan", job.plan.rows()))
        run = Run.create(folder, recipe, job.plan.to_dict(), job.data.classes)
        _write_sample(job, folder)
    else:
        run, console = Run(folder, recipe), Console(quiet=True)
    with Checkpoints(run.checkpoints, job.plan.keep) as checkpoints:
        with ledger.measure("restore"):
            job, start = _resumed(job, checkpoints, console)
        return _Loop(job, run, checkpoints, ledger, console, until, speaks).run_from(start)


def prepare(recipe: Recipe, pod: Pod, options: Options = Options(), model: nnx.Module | None = None) -> Job:
    """Index, model, plan and initial state: all that comes before the first compilation."""
    data = open_index(recipe.data)
    counts = Counts(len(data.train), len(data.val), len(data.classes))
    order.Order(counts.train, recipe.data.lanes, recipe.batch.size, recipe.train.seed)  # refuses impossible lanes
    model = model or models.build(recipe.model, counts.classes, recipe.data.image_size, recipe.train.seed)
    net, params, stats = functional(model)
    steps_per_epoch = counts.train / recipe.batch.size
    schedule = optim.schedule(recipe, recipe.steps(counts.train), steps_per_epoch)
    optimizer = optim.optimizer(recipe, schedule)
    plan = plans.make(recipe, pod, counts, options, footprint(recipe, net, params, stats, optimizer))
    mesh = pod.mesh(plan.tile)
    state = steps.initial_state(recipe, params, stats, optimizer)
    state = jax.device_put(jax.tree.map(np.asarray, state), NamedSharding(mesh, PartitionSpec()))
    return Job(recipe, plan, mesh, data, net, optimizer, schedule, state)


def _resumed(job: Job, checkpoints: Checkpoints, console: Console) -> tuple[Job, int]:
    newest = checkpoints.newest()
    if newest is None:
        return job, 0
    console.print(f"resuming after step {newest:,}", highlight=False)
    return job._replace(state=checkpoints.restore(newest, job.state)), newest


def _write_sample(job: Job, folder: Path) -> None:
    Image.fromarray(loader.eval_pictures(job.data.val, [0], job.recipe)[0]).save(folder / "sample.png")


# --- evaluation --------------------------------------------------------------------------------------------------


class Evaluator:
    """Exact evaluation on all devices: every example counts once, whatever the host and device count."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sharding = pods.batch_sharding(job.mesh)
        self._call: Any = steps.eval_call(job.net, job.plan, job.mesh)

    def compile(self) -> None:
        """Ahead of its first use, so that its time is booked as what it is."""
        size, state = self._job.recipe.data.image_size, self._job.state
        images = self._job.plan.eval_images * self._job.plan.pod.size
        self._call = self._call.lower(
            state.params,
            state.stats,
            jax.ShapeDtypeStruct((images, size, size, 3), np.uint8, sharding=self._sharding),
            jax.ShapeDtypeStruct((images,), np.int32, sharding=self._sharding),
            self._empty(),
        ).compile()

    def __call__(self, state: State) -> dict[str, float]:
        """Accuracy, top-5 accuracy and mean loss over all validation examples, by the averaged weights if there are."""
        job, numbers = self._job, state.average or {"params": state.params, "stats": state.stats}
        tally = self._empty()
        with loader.eval_batches(job.data.val, job.recipe, self._sharding, job.plan.eval_images) as batches:
            for batch in batches:
                tally = self._call(numbers["params"], numbers["stats"], batch.images, batch.labels, tally)
        found = jax.device_get(tally)
        count = int(found.examples)
        return {
            "accuracy": int(found.correct) / count,
            "accuracy_top5": int(found.correct_top5) / count,
            "loss": float(found.loss) / count,
            "examples": count,
        }

    def _empty(self) -> steps.Tally:
        return jax.device_put(steps.empty_tally(), NamedSharding(self._job.mesh, PartitionSpec()))


# --- the loop ----------------------------------------------------------------------------------------------------


class _Loop:
    """One training from a step to the end: load, step, log, evaluate, save."""

    def __init__(
        self,
        job: Job,
        run: Run,
        checkpoints: Checkpoints,
        ledger: Ledger,
        console: Console,
        until: Until | None,
        speaks: bool,
    ) -> None:
        self.job, self.run, self.checkpoints, self.ledger, self.until = job, run, checkpoints, ledger, until
        self.console, self.speaks = console, speaks
        self.evaluator = Evaluator(job)
        self.state = job.state
        self.best = max((m["accuracy"] for m in run.metrics() if m["event"] == "eval"), default=0.0)
        self.last_eval: dict[str, float] = {}
        self.images_trained = 0
        self.first_batch_at = 0.0
        self.reached_s: float | None = None

    def run_from(self, start: int) -> dict[str, Any]:
        plan = self.job.plan
        calls, evals, saves = plan.calls(start), set(plan.eval_steps()), plan.save_points()
        if not calls or self._reached_before():
            return self._finished_before()
        with self.ledger.measure("compile"):
            call = self._compiled()
            self.evaluator.compile()
        self.journal = Journal(self.run.folder, start) if self.speaks else None
        self.display = Display(self.console, plan.steps, start)
        self._write("start", start, devices=plan.pod.size, kind=plan.pod.kind)
        try:
            with self._batches(calls) as batches:
                waiting: tuple[range, Any] | None = None
                self.first_batch_at = self.read_at = time.perf_counter()
                for steps_done in calls:
                    with self.ledger.measure("input wait"):
                        batch = next(batches)
                    with self.ledger.measure("train"):
                        self.state, metrics = call(self.state, batch.images, batch.labels, np.int32(batch.count))
                        if waiting:
                            self._log(*waiting)
                    waiting = (steps_done, metrics)
                    if steps_done.stop in saves:
                        with self.ledger.measure("train"):
                            self._log(*waiting)
                        waiting = None
                        found = self._evaluate(steps_done.stop) if steps_done.stop in evals else None
                        self._save(steps_done.stop, found)
                        if self.reached_s is not None:
                            break
            return self._summary(steps_done.stop)
        finally:
            self.display.close()
            if self.journal:
                self.journal.close()

    def _compiled(self) -> Any:
        plan, size = self.job.plan, self.job.recipe.data.image_size
        sharding = pods.batch_sharding(self.job.mesh, axis=2)
        shape = (plan.steps_per_call, plan.micro_batches, self.job.recipe.batch.size // plan.micro_batches)
        return (
            steps.train_call(self.job.net, plan, self.job.optimizer, self.job.mesh)
            .lower(
                self.state,
                jax.ShapeDtypeStruct((*shape, size, size, 3), np.uint8, sharding=sharding),
                jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding),
                jax.ShapeDtypeStruct((), np.int32),
            )
            .compile()
        )

    def _batches(self, calls: list[range]) -> loader.Batches:
        sharding = pods.batch_sharding(self.job.mesh, axis=2)
        return loader.train_batches(self.job.data.train, self.job.plan, calls, sharding)

    def _log(self, done: range, metrics: steps.Metrics) -> None:
        """Reads a call's metrics, which waits for it, and tells of them."""
        found = jax.device_get(metrics)
        images = len(done) * self.job.recipe.batch.size
        now = time.perf_counter()
        rate, self.read_at = images / (now - self.read_at), now
        self.images_trained += images
        for i, step in enumerate(done):
            values = {name: float(values[i]) for name, values in found._asdict().items()}
            self._write("train", step + 1, **values, learning_rate=float(self.job.schedule(step)), images_per_s=rate)
        waited = self.ledger.seconds["input wait"] / max(now - self.first_batch_at, 1e-9)
        text = (
            f"epoch {done.stop / self.job.plan.steps_per_epoch:.1f}  step {done.stop:,}/{self.job.plan.steps:,}  "
            f"loss {found.loss[len(done) - 1]:.3f}  train accuracy {found.accuracy[len(done) - 1]:.1%}  "
            f"{self._val()}{rate:,.0f} images/s  input wait {waited:.0%}"
        )
        self.display.show(done.stop, text)

    def _val(self) -> str:
        return f"val {self.last_eval['accuracy']:.2%}  " if self.last_eval else ""

    def _evaluate(self, step: int) -> dict[str, float]:
        with self.ledger.measure("evaluate"):
            found = self.last_eval = self.evaluator(self.state)
        seconds = time.perf_counter() - self.first_batch_at
        self.best = max(self.best, found["accuracy"])
        self._write("eval", step, **found, seconds=seconds)
        epoch = step / self.job.plan.steps_per_epoch
        self.display.say(
            f"epoch {epoch:.1f}: {found['accuracy']:.2%} of {found['examples']:,} right after {seconds:.1f} s"
        )
        if self.speaks:
            page.write(self.run)
        if self.until and found[self.until.metric] >= self.until.value:
            self.reached_s = seconds
        return found

    def _save(self, step: int, found: dict[str, float] | None) -> None:
        with self.ledger.measure("checkpoint"):
            self.checkpoints.save(step, self.state, found["accuracy"] if found else None)
        self.read_at = time.perf_counter()  # neither evaluation nor saving counts against the training rate

    def _write(self, event: str, step: int, **values: Any) -> None:
        if self.journal:
            self.journal.write(event, step, **values)

    def _summary(self, step: int) -> dict[str, Any]:
        with self.ledger.measure("checkpoint"):
            self.checkpoints.wait()
        parts = self.ledger.parts()
        busy_s = parts.get("train", 0) + parts.get("input wait", 0)
        summary: dict[str, Any] = {
            "run": str(self.run.folder),
            "recipe": self.job.recipe.name,
            "steps": step,
            "accuracy": self.last_eval.get("accuracy"),
            "accuracy_top5": self.last_eval.get("accuracy_top5"),
            "best_accuracy": self.best,
            "images_per_s": self.images_trained / busy_s if busy_s else 0.0,
            "train_s": time.perf_counter() - self.first_batch_at,
            "compile_s": parts.get("compile", 0.0),
            "seconds": {name: round(s, 3) for name, s in parts.items()},
        }
        if self.until:
            summary |= {
                "until": {self.until.metric: self.until.value},
                "reached": self.reached_s is not None,
                "reached_s": self.reached_s,
                "reached_with_compile_s": None if self.reached_s is None else self.reached_s + summary["compile_s"],
            }
        self._write("end", step, seconds=summary["train_s"])
        if self.speaks:
            write_atomically(self.run.folder / "summary.json", to_json(summary, indent=1))
            page.write(self.run)
        return summary

    def _reached_before(self) -> bool:
        evaluations = [m for m in self.run.metrics() if m["event"] == "eval"]
        return bool(self.until and any(m[self.until.metric] >= self.until.value for m in evaluations))

    def _finished_before(self) -> dict[str, Any]:
        self.console.print(f"{self.run.folder} has already come to its end", highlight=False)
        return self.run.summary() or self._summary_from_metrics()

    def _summary_from_metrics(self) -> dict[str, Any]:
        """For a run that was killed after its last checkpoint and before its summary."""
        evaluations = [m for m in self.run.metrics() if m["event"] == "eval"]
        self.last_eval = evaluations[-1] if evaluations else self.evaluator(self.state)
        self.best = max(self.best, self.last_eval["accuracy"])
        self.first_batch_at, self.journal = time.perf_counter(), None
        return self._summary(self.job.plan.steps)


class _Verb(types.ModuleType):
    """`podscale.train` is the room and the verb: calling the module trains."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
