"""Show: a sheet of what the model will see, made by the code that training gets its batches from.

A training sample is loaded, cropped and mirrored by the loader, at its own position of a step's global batch, and
mixed and erased by the function that the training step calls. What is drawn is the model's input turned back to pixels.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from podscale.data import loader
from podscale.data.files import Progress
from podscale.data.index.dataset import Splits, open_index
from podscale.errors import UserError
from podscale.recipe import Recipe
from podscale.training.device_input import augment

LEAST_SIDE = 96  # pixels of a tile; smaller pictures are enlarged by a whole number
MOST_IMAGES = 1024
LINE, GAP = 16, 6
PAPER, INK = (255, 255, 255), (30, 34, 40)


def write(
    recipe: Recipe, path: Path, split: str = "train", count: int = 48, step: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Draws the sheet into a PNG file, and says what is on it."""
    _check(recipe, path, count, step)
    data = open_index(recipe.data, progress)
    if split == "train":
        count = min(count, recipe.batch.size)
        pixels, targets = training(recipe, data, step, count)
        told = f"{count} of the {recipe.batch.size} training samples of step {step}"
    else:
        count = min(count, len(data.val))
        samples = list(np.linspace(0, len(data.val) - 1, count).astype(int))
        pixels, targets = (
            loader.eval_pictures(data.val, samples, recipe),
            np.eye(len(data.classes))[data.val.labels[samples]],
        )
        told = f"{count} of {len(data.val):,} validation samples"
    names = [_caption(target, data.classes, recipe.augment.label_smoothing) for target in targets]
    try:
        sheet(pixels, names).save(path, "png")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file with --to") from None
    return {"file": str(path), "told": f"{told}, as the model sees them", "images": count, "captions": names}


def training(recipe: Recipe, data: Splits, step: int, count: int) -> tuple[NDArray[np.uint8], NDArray]:
    """The first pictures of a step's batch as the model gets them [n, h, w, 3], and their targets [n, classes]."""
    even = count + count % 2 if recipe.batch.size > 1 else count  # mixing takes pairs
    places = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("one",)), PartitionSpec(None, None, "one"))
    batch = loader.train_pictures(data.train, recipe, step, range(even), places)
    wide = recipe.override({"model.precision": "float32"})
    inputs, targets = augment.prepare(
        wide, batch.images[0, 0], batch.labels[0, 0], jnp.int32(step), jnp.arange(even), len(data.classes)
    )
    mean, std = np.array(recipe.data.mean), np.array(recipe.data.std)
    pixels = np.clip(np.rint((np.asarray(inputs) * std + mean) * 255), 0, 255).astype(np.uint8)
    return pixels[:count], np.asarray(targets)[:count]


def sheet(pixels: NDArray[np.uint8], names: list[str]) -> Image.Image:
    """Pictures in rows, each above its name."""
    side = pixels.shape[1] * max(1, -(-LEAST_SIDE // pixels.shape[1]))
    across = max(1, min(len(pixels), 1100 // (side + GAP)))
    down = -(-len(pixels) // across)
    drawn = Image.new("RGB", (GAP + across * (side + GAP), GAP + down * (side + LINE + GAP)), PAPER)
    pen, font = ImageDraw.Draw(drawn), ImageFont.load_default(12)
    for i, (picture, name) in enumerate(zip(pixels, names, strict=True)):
        x, y = GAP + i % across * (side + GAP), GAP + i // across * (side + LINE + GAP)
        drawn.paste(Image.fromarray(picture).resize((side, side), Image.Resampling.NEAREST), (x, y))
        pen.text((x, y + side + 1), _fitting(name, side, font), fill=INK, font=font)
    return drawn


def _fitting(name: str, side: int, font: Any) -> str:
    while name and font.getlength(name) > side:
        name = name[:-1]
    return name


def _caption(target: NDArray, classes: tuple[str, ...], smoothing: float) -> str:
    """The class; or the two that are mixed, with their shares, where one is not nearly all of it."""
    first, *rest = np.argsort(-target, kind="stable")[:2].tolist()
    if rest and target[rest[0]] - smoothing / len(target) > 0.01:  # more than smoothing gives to every class
        return " + ".join(f"{target[c]:.0%} {classes[c]}" for c in (first, rest[0]))
    return classes[first]


def _check(recipe: Recipe, path: Path, count: int, step: int) -> None:
    if path.suffix.lower() != ".png":
        raise UserError(f"--to {path} must end in .png")
    if not 1 <= count <= MOST_IMAGES:
        raise UserError(f"--images must be 1 to {MOST_IMAGES}, not {count}")
    if step < 0:
        raise UserError(f"--step must be 0 or more, not {step}")
    if recipe.data.path == "" and recipe.data.source != "digits":
        raise UserError("name the data with --data.path, as for podscale train")
