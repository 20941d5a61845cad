"""Export: a trained run as one file that another program can use with nothing else from here.

    safetensors   all numbers by name, to be read back here or by anybody
    stablehlo     the whole program, pixels to probabilities, for JAX on CPU, GPU and TPU
    onnx          the same for ONNX runtimes (ResNets)
    torchvision   the numbers under torchvision's names (ResNets), as safetensors

Each holds its labels, how a picture becomes its input, the recipe, the checkpoint and its accuracy.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.export.metadata import make_metadata
from podscale.export.onnx import to_onnx
from podscale.export.safetensors import write_safetensors, write_torchvision
from podscale.export.stablehlo import write_stablehlo
from podscale.runs.folder import Run
from podscale.training import trained as trained_models
from podscale.training.trained import TrainedModel


def export_model(
    run: Run | str | Path,
    to: str | Path,
    format: str = "",
    which: str = "best",
    model: nnx.Module | None = None,
) -> dict[str, Any]:
    """Writes a run's checkpoint ("best", "newest" or a step) to the file `to`; returns what was written.

    `format` is one of those above; by default the one of the file's ending. `model` replaces the recipe's own.
    """
    run = run if isinstance(run, Run) else Run.load(run)
    path = Path(to)
    form = _choose_format(path, format)
    trained = trained_models.load_trained(run, which, model)
    notes = make_metadata(run, trained.step)
    _write(path, _WRITERS[form](run, trained, notes))
    size = path.stat().st_size
    return {"file": str(path), "format": form, "bytes": size, "run": str(run.folder)} | {
        key: json.loads(notes[key]) for key in ("checkpoint", "accuracy")
    }


def _choose_format(path: Path, format: str) -> str:
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"cannot write {path}: " + ("it is a folder" if path.is_dir() else f"no folder {path.parent}"))
    if not format and path.suffix[1:] not in ENDINGS:
        raise UserError(f"the ending of {path} names no format; use .{', .'.join(ENDINGS)}, or say --format")
    form = format or path.suffix[1:]
    if form not in _WRITERS:
        raise UserError(f"there is no format {form!r} to export to: {suggest_names(form, _WRITERS)}")
    return form


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)


def _onnx(run: Run, trained: TrainedModel, notes: dict[str, str]) -> bytes:
    content: bytes = to_onnx(trained.model(), run.recipe.data, notes).SerializeToString()
    return content


_WRITERS: dict[str, Callable[[Run, TrainedModel, dict[str, str]], bytes]] = {
    "safetensors": write_safetensors,
    "stablehlo": write_stablehlo,
    "onnx": _onnx,
    "torchvision": write_torchvision,
}
ENDINGS = ("safetensors", "stablehlo", "onnx")
