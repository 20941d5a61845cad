"""Metadata of an exported model: what another program must know to use it."""

from typing import Any

from podscale.recipe import Data
from podscale.runs.folder import Run
from podscale.storage.files import to_json


def make_metadata(run: Run, step: int) -> dict[str, str]:
    """Return labels, preprocessing, recipe, checkpoint and accuracy (null if it was not evaluated), each as JSON."""
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
    """Return how an image becomes the model's input, in numbers and in words."""
    shrink = f"shrink it to at most {data.shrink} pixels on the longer side, bilinear; " if data.shrink else ""
    return {
        "image_size": data.image_size,
        "eval_fraction": data.eval_fraction,
        "eval_views": data.eval_views,
        "shrink": data.shrink,
        "mean": list(data.mean),
        "std": list(data.std),
        "resize": "decode to RGB, upright by its EXIF orientation; " + shrink + "crop the centred square whose side "
        "is eval_fraction of the shorter side, rounded to the nearest pixel, its corner rounded down; resize it to "
        "image_size x image_size with a bilinear filter that is widened when it shrinks (Pillow's BILINEAR)",
        "normalize": "(pixel / 255 - mean) / std, per channel; stablehlo and onnx files do this themselves",
    }
