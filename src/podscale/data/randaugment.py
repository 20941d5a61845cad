"""RandAugment: a few of fourteen operations on a cropped image, each drawn with equal chance, at one magnitude.

Cubuk, Zoph, Shlens, Le: "RandAugment: Practical automated data augmentation with a reduced search space", 2020,
section 3. The range of each operation over magnitudes 0 to 30 is torchvision's. The operations on an image follow from
(seed, lane pass, sample), on whichever host they run.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from podscale.data.crop import IMAGES_PER_TASK, run_in_pool
from podscale.data.random import Stream, draw_uniform

MAX_MAGNITUDE = 30.0
PillowImage = Image.Image


def _transform_affine(image: PillowImage, a: float, b: float, c: float, d: float, e: float, f: float) -> PillowImage:
    """Return an image whose pixel (x, y) is the one nearest to (ax + by + c, dx + ey + f), black outside."""
    return image.transform(image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.NEAREST)


# Each takes the image, the strength in 0..1 and a sign. Shears leave the upper left corner in place.
OPERATIONS: Mapping[str, Callable[[PillowImage, float, int], PillowImage]] = MappingProxyType(
    {
        "identity": lambda image, strength, sign: image,
        "shear_x": lambda image, strength, sign: _transform_affine(image, 1, sign * 0.3 * strength, 0, 0, 1, 0),
        "shear_y": lambda image, strength, sign: _transform_affine(image, 1, 0, 0, sign * 0.3 * strength, 1, 0),
        "translate_x": lambda image, strength, sign: _transform_affine(
            image, 1, 0, _compute_shift(image.width, strength, sign), 0, 1, 0
        ),
        "translate_y": lambda image, strength, sign: _transform_affine(
            image, 1, 0, 0, 0, 1, _compute_shift(image.height, strength, sign)
        ),
        "rotate": lambda image, strength, sign: image.rotate(sign * 30 * strength, Image.Resampling.NEAREST),
        "brightness": lambda image, strength, sign: _enhance(ImageEnhance.Brightness, image, strength, sign),
        "color": lambda image, strength, sign: _enhance(ImageEnhance.Color, image, strength, sign),
        "contrast": lambda image, strength, sign: _enhance(ImageEnhance.Contrast, image, strength, sign),
        "sharpness": lambda image, strength, sign: _enhance(ImageEnhance.Sharpness, image, strength, sign),
        "posterize": lambda image, strength, sign: ImageOps.posterize(image, 8 - int(4 * strength + 0.5)),
        "solarize": lambda image, strength, sign: ImageOps.solarize(image, math.ceil(255 - 255 * strength)),
        "autocontrast": lambda image, strength, sign: ImageOps.autocontrast(image),
        "equalize": lambda image, strength, sign: ImageOps.equalize(image),
    }
)


def _compute_shift(extent: int, strength: float, sign: int) -> int:
    return sign * int(150 / 331 * extent * strength)


def _enhance(
    enhancer: Callable[[PillowImage], ImageEnhance._Enhance], image: PillowImage, strength: float, sign: int
) -> PillowImage:
    return enhancer(image).enhance(1 + sign * 0.9 * strength)


def draw_operations(count: int, seed: int, lane_pass: int, sample: int) -> list[tuple[str, int]]:
    """Return the names and signs of the operations that a sample gets in a lane pass.

    >>> draw_operations(2, seed=0, lane_pass=0, sample=0) == draw_operations(2, seed=0, lane_pass=0, sample=0)
    True
    """
    names = list(OPERATIONS)
    numbers = draw_uniform(seed, Stream.RANDAUGMENT, lane_pass, sample, np.arange(count))
    return [(names[int(which * len(names))], 1 if sign < 0.5 else -1) for which, sign, *_ in numbers.tolist()]


def augment_image(
    pixels: NDArray[np.uint8], count: int, magnitude: float, seed: int, lane_pass: int, sample: int
) -> NDArray[np.uint8]:
    """Return one image, uint8 [height, width, 3], after `count` operations of `magnitude` (0 to 30)."""
    image = Image.fromarray(pixels)
    for name, sign in draw_operations(count, seed, lane_pass, sample):
        image = OPERATIONS[name](image, magnitude / MAX_MAGNITUDE, sign)
    return np.asarray(image)


def augment_batch(
    images: NDArray[np.uint8],
    count: int,
    magnitude: float,
    seed: int,
    passes: NDArray[np.integer],
    samples: NDArray[np.integer],
    pool: Executor | None = None,
) -> None:
    """Apply `augment_image` to each of images [n, height, width, 3], in place; in parallel if there is a pool."""

    def augment_part(part: slice) -> None:
        for i in range(part.start, part.stop):
            images[i] = augment_image(images[i], count, magnitude, seed, int(passes[i]), int(samples[i]))

    if count:
        run_in_pool(pool, augment_part, len(images), IMAGES_PER_TASK)
