"""Trackers: programs that people watch trainings with, behind one small interface.

TensorBoard's files are always written. Weights & Biases and MLflow hear of a run if they are named (`--track wandb`),
and are imported only then. A tracker gets the numbers of every event, in the first process alone. To add one, write a
function from a run to a `Tracker` and put it into `TRACKERS`.
"""

import importlib
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.runs.events import Event
from podscale.runs.folder import Run


class Tracker(Protocol):
    """Takes the numbers of a run as they come."""

    def write(self, event: Event) -> None:
        """One point in each curve."""

    def close(self) -> None:
        """No more will come."""


def numbers(event: Event) -> dict[str, float]:
    """The curves that an event adds a point to, by name.

    >>> numbers(Event("eval", 12, 1.0, {"accuracy": 0.5, "spent": {}}))
    {'eval/accuracy': 0.5}
    """
    found = {f"{event.kind}/{name}": value for name, value in event.values.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


class TensorBoard:
    """Event files in the run's folder. Points past the step that a run resumes from stay, and come twice.

    A record that did not fit on the disk ends its file, as readers do not get past it; the next one begins another.
    TensorBoard's own writer never writes again after such a fault.
    """

    def __init__(self, run: Run) -> None:
        self._folder = run.folder / "tensorboard"
        self._writer: Any = None

    def write(self, event: Event) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # slow to import, and only needed here

        points = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in numbers(event).items()]
        if points:
            summary = summary_pb2.Summary(value=points)
            self._append(event_pb2.Event(wall_time=time.time(), step=event.step, summary=summary))

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _append(self, record: Any) -> None:
        try:
            if self._writer is None:
                self._writer = self._begun()
            self._writer.write(record.SerializeToString())
            self._writer.flush()
        except OSError:
            with suppress(OSError):
                self.close()
            raise

    def _begun(self) -> Any:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        writer: Any = RecordWriter((self._folder / name).open("xb"))
        writer.write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        return writer


class WeightsAndBiases:
    """A run of Weights & Biases, named like the run's folder; its own settings (WANDB_MODE, ...) hold as ever.

    A run that is resumed goes on as the same one there.
    """

    def __init__(self, run: Run) -> None:
        wandb = _imported("wandb", "wandb")
        name = run.folder.resolve().name
        project = os.environ.get("WANDB_PROJECT", "podscale")
        identity = f"{name}-{run.recipe.digest()}"[-64:]
        self._run: Any = wandb.init(
            project=project, name=name, id=identity, resume="allow", dir=str(run.folder), config=run.recipe.to_dict()
        )

    def write(self, event: Event) -> None:
        if found := numbers(event):
            self._run.log(found | {"epoch": event.epoch}, step=event.step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow's experiment `podscale`; its own settings (MLFLOW_TRACKING_URI, ...) hold as ever."""

    def __init__(self, run: Run) -> None:
        mlflow = _imported("mlflow", "mlflow")
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "podscale"))
        self._client: Any = mlflow.MlflowClient()
        kept = run.folder / "mlflow-run"
        if not kept.exists():
            experiment = mlflow.get_experiment_by_name(os.environ.get("MLFLOW_EXPERIMENT_NAME", "podscale"))
            begun = self._client.create_run(experiment.experiment_id, run_name=run.folder.resolve().name)
            kept.write_text(begun.info.run_id, encoding="utf-8")
            for section, fields in run.recipe.to_dict().items():
                for field, value in fields.items():
                    self._client.log_param(begun.info.run_id, f"{section}.{field}", value)
        self._id = kept.read_text(encoding="utf-8")

    def write(self, event: Event) -> None:
        for name, value in numbers(event).items():
            self._client.log_metric(self._id, name, value, step=event.step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[Run], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
ALWAYS = ("tensorboard",)


def check(names: Collection[str]) -> None:
    """Refuses trackers that are not known."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"there is no tracker {name!r}: {suggest_names(name, TRACKERS)}")


def opened(run: Run, names: Collection[str]) -> list[Tracker]:
    """The trackers that always are told, and those that are named."""
    check(names)
    with _refusing():
        return [TRACKERS[name](run) for name in dict.fromkeys((*ALWAYS, *names))]


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{package} is not installed; pip install {package}, or leave it out of --track") from None


@contextmanager
def _refusing() -> Iterator[None]:
    """A tracker that cannot begin ends the run before it does: better than a training that nobody sees."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:  # whatever a foreign library raises
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"a tracker could not be started: {why[:300]}") from error
