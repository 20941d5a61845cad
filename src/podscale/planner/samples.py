"""Draw a grid of the samples that the model will see, with the code that makes training's batches.

A training sample is loaded, cropped and flipped by the loader, at its own position in a step's global batch, and mixed
and erased by the function that the training step calls. The grid shows the model's input turned back into pixels.
"""

from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from podscale.config.json_types import JsonObject
from podscale.data import loader
from podscale.data.files import Progress
from podscale.data.index.dataset import Splits, open_index
from podscale.errors import UserError
from podscale.recipe import Recipe
from podscale.storage.paths import require_local
from podscale.training.device_input import augment

MIN_SIDE = 96  # pixels on the grid; smaller images are enlarged by a whole number
MAX_IMAGES = 1024
CAPTION_HEIGHT, GAP = 16, 6
BACKGROUND, TEXT_COLOR = (255, 255, 255), (30, 34, 40)


def write_grid(
    recipe: Recipe, path: Path, split: str = "train", count: int = 48, step: int = 0, progress: Progress | None = None
) -> JsonObject:
    """Draw the grid into a PNG file.

    Args:
        recipe: names the data and how it is augmented.
        path: file to write; must end in .png.
        split: "train" or "val".
        count: maximum number of images.
        step: the training step whose batch is drawn.
        progress: called during a scan of the data set.

    Returns:
        A summary that JSON can hold: the file, a description, the number of images and their captions.
    """
    require_local(path, "--to")
    _check_arguments(recipe, path, count, step)
    data = open_index(recipe.data, progress)
    if split == "train":
        count = min(count, recipe.batch.size)
        pixels, targets = load_training_samples(recipe, data, step, count)
        description = f"{count} of the {recipe.batch.size} training samples of step {step}"
    else:
        count = min(count, len(data.val))
        samples = list(np.linspace(0, len(data.val) - 1, count).astype(int))
        pixels, targets = (
            loader.load_eval_images(data.val, samples, recipe),
            np.eye(len(data.classes))[data.val.labels[samples]],
        )
        description = f"{count} of {len(data.val):,} validation samples"
    captions = [_make_caption(target, data.classes, recipe.augment.label_smoothing) for target in targets]
    try:
        draw_grid(pixels, captions).save(path, "png")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file with --to") from None
    return {
        "file": str(path),
        "description": f"{description}, as the model sees them",
        "images": count,
        "captions": captions,
    }


def load_training_samples(recipe: Recipe, data: Splits, step: int, count: int) -> tuple[NDArray[np.uint8], NDArray]:
    """Return the first images of a step's batch as the model gets them [n, h, w, 3], and their targets [n, classes]."""
    even = count + count % 2 if recipe.batch.size > 1 else count  # mixing needs pairs
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("one",)), PartitionSpec(None, None, "one"))
    batch = loader.load_train_images(data.train, recipe, step, range(even), sharding)
    float32_recipe = recipe.override({"model.precision": "float32"})
    prepare = jax.jit(partial(augment.prepare_batch, float32_recipe, classes=len(data.classes)))
    inputs, targets = prepare(batch.images[0, 0], batch.labels[0, 0], np.int32(step), np.arange(even))
    mean, std = np.array(recipe.data.mean), np.array(recipe.data.std)
    pixels = np.clip(np.rint((np.asarray(inputs) * std + mean) * 255), 0, 255).astype(np.uint8)
    return pixels[:count], np.asarray(targets)[:count]


def draw_grid(pixels: NDArray[np.uint8], captions: list[str]) -> Image.Image:
    """Draw images in rows, each above its caption."""
    side = pixels.shape[1] * max(1, -(-MIN_SIDE // pixels.shape[1]))
    columns = max(1, min(len(pixels), 1100 // (side + GAP)))
    rows = -(-len(pixels) // columns)
    grid = Image.new("RGB", (GAP + columns * (side + GAP), GAP + rows * (side + CAPTION_HEIGHT + GAP)), BACKGROUND)
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(12)
    for i, (image, caption) in enumerate(zip(pixels, captions, strict=True)):
        x, y = GAP + i % columns * (side + GAP), GAP + i // columns * (side + CAPTION_HEIGHT + GAP)
        grid.paste(Image.fromarray(image).resize((side, side), Image.Resampling.NEAREST), (x, y))
        draw.text((x, y + side + 1), _truncate_to_width(caption, side, font), fill=TEXT_COLOR, font=font)
    return grid


def _truncate_to_width(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    while text and font.getlength(text) > width:
        text = text[:-1]
    return text


def _make_caption(target: NDArray, classes: tuple[str, ...], smoothing: float) -> str:
    """Return the class name; or the two classes that are mixed and their shares, unless the second is negligible."""
    first, *others = np.argsort(-target, kind="stable")[:2].tolist()
    if others and target[others[0]] - smoothing / len(target) > 0.01:  # more than smoothing gives to every class
        return " + ".join(f"{target[c]:.0%} {classes[c]}" for c in (first, others[0]))
    return classes[first]


def _check_arguments(recipe: Recipe, path: Path, count: int, step: int) -> None:
    if path.suffix.lower() != ".png":
        raise UserError(f"--to {path} must end in .png")
    if not 1 <= count <= MAX_IMAGES:
        raise UserError(f"--images must be 1 to {MAX_IMAGES}, not {count}")
    if step < 0:
        raise UserError(f"--step must be 0 or more, not {step}")
    if recipe.data.path == "" and recipe.data.source != "digits":
        raise UserError("name the data with --data.path, as for podscale train")
