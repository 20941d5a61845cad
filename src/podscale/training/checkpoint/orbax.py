"""Read checkpoints that earlier versions wrote with Orbax; nothing else imports it."""

import json
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from podscale.errors import UserError
from podscale.storage.files import name_file, open_regular
from podscale.training.checkpoint import files

METADATA, METRICS = "_CHECKPOINT_METADATA", "metrics/metrics"
ITEM = "default"  # the folder of the arrays


def is_orbax(path: Path) -> bool:
    """Return whether a folder is a checkpoint that Orbax wrote."""
    return (path / METADATA).exists() or (path / ITEM).is_dir()


def read_accuracy(path: Path) -> float | None:
    """Return the validation accuracy of a checkpoint, if it was evaluated.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not valid JSON.
    """
    _read_json(path / METADATA)
    metrics = _read_json(path / METRICS)
    return float(metrics["accuracy"]) if isinstance(metrics, dict) and "accuracy" in metrics else None


def _read_json(path: Path) -> Any:
    try:
        with name_file(path), open_regular(path) as file:
            content = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return {}  # reported when it is needed
    except (RecursionError, IsADirectoryError):
        raise ValueError(f"{path} is not valid JSON") from None
    if not content:
        raise ValueError(f"{path} is empty")
    return content


def restore_arrays(path: Path, target: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arrays and metadata of a checkpoint, whose bytes are all read first: that shows what can be read.

    Several processes read together, so that none of them can try again alone once the library has started.

    Raises:
        UserError: Orbax is not installed, or the files cannot be read now.
        ValueError: the files can be read, but are damaged.
    """
    orbax = _import_orbax(path)
    delays = list(files.RETRY_DELAYS_S) if jax.process_count() == 1 else []
    while True:
        files.retry_reading(partial(files.read_every_byte, path), path)
        try:
            with orbax.StandardCheckpointer() as checkpointer:
                _check_fits(int(path.name), checkpointer.metadata(path / ITEM), target)
                arrays = checkpointer.restore(path / ITEM, target)
            metadata = _read_json(path / METADATA)["custom_metadata"]
            if isinstance(metadata["digests"], dict):
                return arrays, metadata
        except (UserError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax does not document what it raises on damaged files
            if problem := files.find_read_problem(error):
                if not delays:
                    raise files.UnreadableCheckpointError(path, problem) from None
                time.sleep(delays.pop(0))
                continue
        files.retry_reading(partial(files.read_every_byte, path), path)
        raise ValueError("it cannot be read")


def _import_orbax(path: Path) -> ModuleType:
    try:
        import orbax.checkpoint
    except ImportError:
        raise UserError(
            f"checkpoint {path} was written by an earlier version, with Orbax, which is not installed; "
            "pip install 'podscale[orbax]'"
        ) from None
    return orbax.checkpoint


def _check_fits(step: int, metadata: Any, target: dict[str, Any]) -> None:
    """Compare names and shapes first: Orbax fails in the middle of its threads, which then print to stderr."""
    tree = metadata.item_metadata.tree if hasattr(metadata, "item_metadata") else metadata
    check_fits(step, {name: tuple(array.shape) for name, array in tree.items()}, target)


def check_fits(step: int, saved: dict[str, tuple[int, ...]], target: dict[str, Any]) -> None:
    """Compare the shapes of saved arrays with those of a state.

    Raises:
        UserError: an array is missing, or has another shape.
    """
    for name, array in target.items():
        if saved.get(name) != array.shape:
            problem = f"has shape {saved[name]}" if name in saved else "is missing"
            raise UserError(
                f"checkpoint {step} does not fit the model of this recipe: {name} {problem}, wanted {array.shape}"
            )
