"""Experiment trackers behind one small interface: TensorBoard, Weights & Biases, MLflow.

TensorBoard's files are always written. Weights & Biases and MLflow log a run only if they are named (`--track wandb`),
and are imported only then. A tracker gets the scalars of every event, in the main process alone. To add one, write a
function from a run to a `Tracker` and add it to `TRACKERS`.
"""

import importlib
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, Protocol

from podscale.config.registry import Registry
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.runs.events import Event, ReporterError
from podscale.runs.folder import Run
from podscale.storage.files import write_atomically
from podscale.training.reporters import tensorboard_events


class TrackerError(ReporterError):
    """Trackers that failed, by name, each with what it raised.

    >>> print(TrackerError({"mlflow": RuntimeError("connection refused")}))
    tracker mlflow failed: connection refused
    """

    def __init__(self, errors: Mapping[str, Exception]) -> None:
        reasons = [_shorten(error) for error in errors.values()]
        super().__init__(f"tracker {', '.join(errors)}", "; ".join(reasons))


def _shorten(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


class Tracker(Protocol):
    """Logs the scalars of a run as they come."""

    def write(self, event: Event) -> None:
        """Add one point to each curve."""

    def close(self) -> None:
        """End the log: no more events follow."""


def to_scalars(event: Event) -> dict[str, float]:
    """Return the points that an event adds to curves, by the curve's name.

    >>> to_scalars(Event("eval", 12, 1.0, {"accuracy": 0.5, "spent": {}}))
    {'eval/accuracy': 0.5}
    """
    values = {f"{event.kind}/{name}": value for name, value in event.values.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


class TensorBoard:
    """Event files in the run's folder. Points after the step that a run resumes from stay, and appear twice.

    A record that did not fit on the disk ends its file, because readers do not get past it; the next record starts a
    new file.
    """

    def __init__(self, run: Run) -> None:
        self._folder = run.folder / "tensorboard"
        self._file: IO[bytes] | None = None

    def write(self, event: Event) -> None:
        scalars = to_scalars(event)
        if not scalars:
            return
        try:
            if self._file is None:
                self._file = self._open_file()
            self._file.write(tensorboard_events.encode_scalars(time.time(), event.step, scalars))
            self._file.flush()
        except OSError:
            with suppress(OSError):
                self.close()
            raise

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _open_file(self) -> IO[bytes]:
        self._folder.mkdir(exist_ok=True)
        file = (self._folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}").open("xb")
        file.write(tensorboard_events.encode_version(time.time()))
        return file


class WeightsAndBiases:
    """A run of Weights & Biases, named like the run's folder; its own settings (WANDB_MODE, ...) apply as usual.

    A resumed run continues as the same run there.
    """

    def __init__(self, run: Run) -> None:
        wandb = _import_tracker("wandb", "wandb")
        name = run.folder.resolve().name
        project = os.environ.get("WANDB_PROJECT", "podscale")
        identity = f"{name}-{run.recipe.digest()}"[-64:]
        self._run: Any = wandb.init(
            project=project, name=name, id=identity, resume="allow", dir=str(run.folder), config=run.recipe.to_dict()
        )

    def write(self, event: Event) -> None:
        if scalars := to_scalars(event):
            self._run.log(scalars | {"epoch": event.epoch}, step=event.step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow's experiment `podscale`; its own settings (MLFLOW_TRACKING_URI, ...) apply as usual."""

    def __init__(self, run: Run) -> None:
        mlflow = _import_tracker("mlflow", "mlflow")
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "podscale"))
        self._client: Any = mlflow.MlflowClient()
        id_file = run.folder / "mlflow-run"
        if not id_file.exists():
            experiment = mlflow.get_experiment_by_name(os.environ.get("MLFLOW_EXPERIMENT_NAME", "podscale"))
            created = self._client.create_run(experiment.experiment_id, run_name=run.folder.resolve().name)
            write_atomically(id_file, created.info.run_id)
            for section, fields in run.recipe.to_dict().items():
                for field, value in fields.items():
                    self._client.log_param(created.info.run_id, f"{section}.{field}", value)
        self._id = id_file.read_text(encoding="utf-8")

    def write(self, event: Event) -> None:
        for name, value in to_scalars(event).items():
            self._client.log_metric(self._id, name, value, step=event.step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: Registry[Callable[[Run], Tracker]] = Registry(
    "tracker", {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
)
DEFAULT_TRACKERS = ("tensorboard",)


def check_trackers(names: Collection[str]) -> None:
    """Raise a `UserError` at the first unknown tracker."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"there is no tracker {name!r}: {suggest_names(name, TRACKERS)}")


def list_trackers(names: Collection[str]) -> list[str]:
    """Return the default trackers and those that are named."""
    return list(dict.fromkeys((*DEFAULT_TRACKERS, *names)))


def open_tracker(run: Run, name: str) -> Tracker:
    """Open a tracker.

    Raises:
        UserError: it cannot be started: a run that is not tracked should not start.
        OSError: the run's folder cannot be written.
    """
    with _refuse_failed_start():
        return TRACKERS[name](run)


def _import_tracker(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{package} is not installed; pip install {package}, or leave it out of --track") from None


@contextmanager
def _refuse_failed_start() -> Iterator[None]:
    """Turn the failed start of a tracker into a `UserError`: a run that is not tracked should not start."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:  # other libraries raise anything
        raise UserError(f"a tracker could not be started: {_shorten(error)}") from error
