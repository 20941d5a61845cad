"""What another program must know about an exported model."""

from typing import Any

from podscale.recipe import Data
from podscale.runs.folder import Run
from podscale.storage.files import to_json

# --- what another program must know --------------------------------------------------------------------------------


def make_metadata(run: Run, step: int) -> dict[str, str]:
    """Names to JSON: labels, preprocessing, recipe, checkpoint and accuracy (null if it was not evaluated)."""
    accuracies = [line["accuracy"] for line in run.metrics() if line["event"] == "eval" and line["step"] == step]
    facts = {
        "labels": list(run.classes()),
        "preprocessing": describe_preprocessing(run.recipe.data),
        "recipe": run.recipe.to_dict() | {"name": run.recipe.name},
        "checkpoint": step,
        "accuracy": accuracies[-1] if accuracies else None,
    }
    return {"format": "podscale"} | {name: to_json(value) for name, value in facts.items()}


def describe_preprocessing(data: Data) -> dict[str, Any]:
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
