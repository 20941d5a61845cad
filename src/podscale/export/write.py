"""Export a trained run as one file that another program can use without Podscale.

    safetensors   all arrays by name, for Podscale and others to read
    stablehlo     the whole program, from pixels to probabilities, for JAX on CPU, GPU and TPU
    onnx          the same for ONNX runtimes (ResNets)
    torchvision   the arrays under torchvision's names (ResNets), as safetensors
    timm          the arrays under timm's names (ResNets, Vision Transformers, EfficientNets, ConvNeXts), as safetensors

Each holds its labels, how an image becomes its input, the recipe, the checkpoint and its accuracy.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from flax import nnx

from podscale.config.json_types import JsonObject
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.export.metadata import make_metadata
from podscale.export.onnx import to_onnx
from podscale.export.safetensors import write_safetensors, write_timm, write_torchvision
from podscale.export.stablehlo import write_stablehlo
from podscale.runs.folder import Run
from podscale.storage.paths import require_local
from podscale.training import restore as trained_models
from podscale.training.restore import TrainedModel


def export_model(
    run: Run | str | Path,
    to: str | Path,
    format: str = "",
    which: str = "best",
    model: nnx.Module | None = None,
) -> JsonObject:
    """Write a run's model to a file for other programs.

    Args:
        run: the run, or its folder.
        to: the file to write.
        format: "safetensors", "stablehlo", "onnx", "torchvision" or "timm"; by default the one of the file's suffix.
        which: the checkpoint: "best", "newest" or a step.
        model: a flax.nnx module instead of the recipe's own.

    Returns:
        `file`, `format`, size in `bytes`, `run`, step of the `checkpoint` and its `accuracy`.

    Raises:
        UserError: the file cannot be written, or the format is unknown, does not fit the model or needs a package that
            is not installed.

    Examples:
        >>> import tempfile
        >>> import podscale
        >>> from rich.console import Console
        >>> recipe = podscale.load_recipe("digits").override({"model.width": 4, "train.epochs": 0.1})
        >>> pod, quiet = podscale.find_pod(virtual="1x1"), Console(quiet=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     summary = podscale.train(recipe, pod=pod, folder=folder, console=quiet)
        ...     result = podscale.export_model(folder, f"{folder}/model.safetensors")
        >>> result["format"], result["checkpoint"]
        ('safetensors', 2)
    """
    require_local(to, "--to")
    run = run if isinstance(run, Run) else Run.load(run)
    path = Path(to)
    format_name = _choose_format(path, format)
    trained = trained_models.load_trained(run, which, model)
    metadata = make_metadata(run, trained.step)
    _write_file(path, _WRITERS[format_name](run, trained, metadata))
    size = path.stat().st_size
    return {"file": str(path), "format": format_name, "bytes": size, "run": run.where} | {
        key: json.loads(metadata[key]) for key in ("checkpoint", "accuracy")
    }


def _choose_format(path: Path, format: str) -> str:
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"cannot write {path}: " + ("it is a folder" if path.is_dir() else f"no folder {path.parent}"))
    if not format and path.suffix[1:] not in SUFFIXES:
        raise UserError(f"the ending of {path} names no format; use .{', .'.join(SUFFIXES)}, or give one with --format")
    format_name = format or path.suffix[1:]
    if format_name not in _WRITERS:
        raise UserError(f"there is no format {format_name!r} to export to: {suggest_names(format_name, _WRITERS)}")
    return format_name


def _write_file(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(content)
    os.replace(partial, path)


def _write_onnx(run: Run, trained: TrainedModel, metadata: dict[str, str]) -> bytes:
    content: bytes = to_onnx(trained.build_module(), run.recipe.data, metadata).SerializeToString()
    return content


_WRITERS: Mapping[str, Callable[[Run, TrainedModel, dict[str, str]], bytes]] = MappingProxyType(
    {
        "safetensors": write_safetensors,
        "stablehlo": write_stablehlo,
        "onnx": _write_onnx,
        "torchvision": write_torchvision,
        "timm": write_timm,
    }
)
SUFFIXES = ("safetensors", "stablehlo", "onnx")
