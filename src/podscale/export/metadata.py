"""Metadata of an exported model: what another program must know to use it."""

from podscale.config.json_types import JsonObject
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


def write_pillow_code(data: Data) -> str:
    """Return Python code that turns the file at `path` into the model's input `pixels`, exactly as Podscale does.

    Except for RGB PNGs of 16 bits in which one color is transparent.
    """
    lines = [
        "import numpy as np",
        "from PIL import Image, ImageOps",
        "image = ImageOps.exif_transpose(Image.open(path))",
        'if image.mode.startswith("I"):  # gray of 16 bits, of which the upper 8 are used',
        "    gray = np.asarray(image)",
        '    gray = np.where(gray == image.info.get("transparency", -1), 255, gray >> 8)',
        "    image = Image.fromarray(gray.astype(np.uint8))",
        "if image.has_transparency_data:  # transparent images lie on white",
        '    image = image.convert("RGBA")',
        '    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)',
        'image = image.convert("RGB")',
    ]
    if data.shrink:
        lines += [
            f"scale = min({data.shrink} / max(image.size), 1.0)",
            "width, height = (max(int(side * scale + 0.5), 1) for side in image.size)",
            "image = image.resize((width, image.height), Image.Resampling.BILINEAR)",
            "image = image.resize((width, height), Image.Resampling.BILINEAR)",
        ]
    lines += [
        f"side = max(int({data.eval_fraction} * min(image.size) + 0.5), 1)",
        "left, top = (image.width - side) // 2, (image.height - side) // 2",
        "box = (left, 0, left + side, image.height)",
        f"image = image.resize(({data.image_size}, image.height), Image.Resampling.BILINEAR, box=box)",
        f"box = (0, top, {data.image_size}, top + side)",
        f"image = image.resize(({data.image_size}, {data.image_size}), Image.Resampling.BILINEAR, box=box)",
        "pixels = np.asarray(image)[None]",
    ]
    return "\n".join(lines) + "\n"


def describe_preprocessing(data: Data) -> JsonObject:
    """Return how an image becomes the model's input, in numbers and in words."""
    shrink = f"shrink it to at most {data.shrink} pixels on the longer side, bilinear; " if data.shrink else ""
    return {
        "image_size": data.image_size,
        "eval_fraction": data.eval_fraction,
        "eval_views": data.eval_views,
        "shrink": data.shrink,
        "mean": list(data.mean),
        "std": list(data.std),
        "resize": "decode to RGB, upright by its EXIF orientation, the upper 8 of 16 bits, transparency composited "
        "over white; " + shrink + "take the centred square whose side "
        "is eval_fraction of the shorter side, rounded to the nearest pixel, its corner rounded down; resize it to "
        "image_size x image_size, first horizontally, with a bilinear filter that is widened when it shrinks and sees "
        "the pixels around the square (Pillow's BILINEAR with box=; crop() first gives other pixels)",
        "pillow": write_pillow_code(data),
        "normalize": "(pixel / 255 - mean) / std, per channel; stablehlo and onnx files do this themselves",
    }
