"""Export: a trained run as one file that another program can use with nothing else from here.

    safetensors   all numbers by name, to be read back here or by anybody
    stablehlo     the whole program, pixels to probabilities, for JAX on CPU, GPU and TPU
    onnx          the same for ONNX runtimes (ResNets)
    torchvision   the numbers under torchvision's names (ResNets), as safetensors

Each holds its labels, how a picture becomes its input, the recipe, the checkpoint and its accuracy.
"""

import io
import json
import os
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from podscale import step as steps
from podscale import weights
from podscale.errors import UserError, nearest
from podscale.models.onnx import to_onnx
from podscale.models.torchvision import state_dict
from podscale.recipe import Data
from podscale.run import Run, to_json
from podscale.weights import Trained, named

PLATFORMS = ("cpu", "cuda", "tpu")
PROGRAM, NOTES = "program.jax", "metadata.json"  # what a .stablehlo file, a zip archive, holds


def export(
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
    form = _form(path, format)
    trained = weights.of_run(run, which, model)
    notes = metadata(run, trained.step)
    _write(path, _WRITERS[form](run, trained, notes))
    size = path.stat().st_size
    return {"file": str(path), "format": form, "bytes": size, "run": str(run.folder)} | {
        key: json.loads(notes[key]) for key in ("checkpoint", "accuracy")
    }


def _form(path: Path, format: str) -> str:
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"cannot write {path}: " + ("it is a folder" if path.is_dir() else f"no folder {path.parent}"))
    if not format and path.suffix[1:] not in ENDINGS:
        raise UserError(f"the ending of {path} names no format; use .{', .'.join(ENDINGS)}, or say --format")
    form = format or path.suffix[1:]
    if form not in _WRITERS:
        raise UserError(f"there is no format {form!r} to export to: {nearest(form, _WRITERS)}")
    return form


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)


# --- what another program must know --------------------------------------------------------------------------------


def metadata(run: Run, step: int) -> dict[str, str]:
    """Names to JSON: labels, preprocessing, recipe, checkpoint and accuracy (null if it was not evaluated)."""
    accuracies = [line["accuracy"] for line in run.metrics() if line["event"] == "eval" and line["step"] == step]
    facts = {
        "labels": list(run.classes()),
        "preprocessing": preprocessing(run.recipe.data),
        "recipe": run.recipe.to_dict() | {"name": run.recipe.name},
        "checkpoint": step,
        "accuracy": accuracies[-1] if accuracies else None,
    }
    return {"format": "podscale"} | {name: to_json(value) for name, value in facts.items()}


def preprocessing(data: Data) -> dict[str, Any]:
    """How a picture becomes what the model takes, in numbers and in words."""
    shrink = f"shrink it to at most {data.shrink} pixels on the longer side, bilinear; " if data.shrink else ""
    return {
        "image_size": data.image_size,
        "eval_fraction": data.eval_fraction,
        "eval_views": data.eval_views,
        "shrink": data.shrink,
        "mean": list(data.mean),
        "std": list(data.std),
        "resize": "decode to RGB, upright by its EXIF orientation; " + shrink + "cut out the centred square whose side "
        "is eval_fraction of the shorter side, rounded to the nearest pixel, its corner rounded down; resize it to "
        "image_size x image_size with a bilinear filter that is widened when it shrinks (Pillow's BILINEAR)",
        "normalize": "(pixel / 255 - mean) / std, per channel; stablehlo and onnx files do this themselves",
    }


# --- formats -------------------------------------------------------------------------------------------------------


def _safetensors(run: Run, trained: Trained, notes: dict[str, str]) -> bytes:
    arrays = {name: np.asarray(array) for name, array in named(trained.params, trained.stats).items()}
    return safetensors.numpy.save(arrays, notes)


def _torchvision(run: Run, trained: Trained, notes: dict[str, str]) -> bytes:
    return safetensors.numpy.save(state_dict(trained.model()), notes)


def _onnx(run: Run, trained: Trained, notes: dict[str, str]) -> bytes:
    content: bytes = to_onnx(trained.model(), run.recipe.data, notes).SerializeToString()
    return content


def _stablehlo(run: Run, trained: Trained, notes: dict[str, str]) -> bytes:
    program = _program(run, trained)
    facts = {name: json.loads(value) for name, value in notes.items() if name != "format"}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:  # stored as they are: weights do not compress
        archive.writestr(PROGRAM, program)
        archive.writestr(NOTES, to_json(facts, indent=1))
    return file.getvalue()


def _program(run: Run, trained: Trained) -> bytes:
    """Pixels uint8 [batch, size, size, 3] to probabilities, for any batch, with the weights inside."""
    try:
        import flatbuffers  # noqa: F401 (JAX writes with it, and does not bring it along)
    except ImportError:
        raise UserError("writing StableHLO needs the package flatbuffers: pip install 'podscale[export]'") from None
    from jax import export as jax_export  # not an attribute of `jax` until it is imported

    predict, size = steps.predictor(trained.net, run.recipe), run.recipe.data.image_size
    params, stats = jax.device_get((trained.params, trained.stats))
    pixels = jax.ShapeDtypeStruct((*jax_export.symbolic_shape("batch"), size, size, 3), np.uint8)
    exported = jax_export.export(jax.jit(lambda images: predict(params, stats, images)), platforms=PLATFORMS)
    return bytes(exported(pixels).serialize())


_WRITERS: dict[str, Callable[[Run, Trained, dict[str, str]], bytes]] = {
    "safetensors": _safetensors,
    "stablehlo": _stablehlo,
    "onnx": _onnx,
    "torchvision": _torchvision,
}
ENDINGS = ("safetensors", "stablehlo", "onnx")


class _Verb(types.ModuleType):
    """`podscale.export` is the room and the verb: calling the module exports."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return export(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
