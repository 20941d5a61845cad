"""RandAugment: a few of fourteen operations on a cropped picture, each drawn with equal chance, one strength for all.

Cubuk, Zoph, Shlens, Le: "RandAugment: Practical automated data augmentation with a reduced search space", 2020,
section 3. The range of each operation over magnitudes 0 to 30 is torchvision's. What is done to a picture follows from
(seed, lane pass, sample), whoever does it.
"""

import math
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from podscale.data.crop import PICTURES_PER_TASK, spread
from podscale.data.random import Stream, uniform

STRONGEST = 30.0
Picture = Image.Image


def _affine(picture: Picture, a: float, b: float, c: float, d: float, e: float, f: float) -> Picture:
    """Pixel (x, y) of the result is the one nearest to (ax + by + c, dx + ey + f); black where there is none."""
    return picture.transform(picture.size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.NEAREST)


# Each takes the picture, the strength in 0..1 and a sign. Shears keep the upper left corner in place.
OPERATIONS: dict[str, Callable[[Picture, float, int], Picture]] = {
    "identity": lambda picture, strength, sign: picture,
    "shear_x": lambda picture, strength, sign: _affine(picture, 1, sign * 0.3 * strength, 0, 0, 1, 0),
    "shear_y": lambda picture, strength, sign: _affine(picture, 1, 0, 0, sign * 0.3 * strength, 1, 0),
    "translate_x": lambda picture, strength, sign: _affine(
        picture, 1, 0, _shift(picture.width, strength, sign), 0, 1, 0
    ),
    "translate_y": lambda picture, strength, sign: _affine(
        picture, 1, 0, 0, 0, 1, _shift(picture.height, strength, sign)
    ),
    "rotate": lambda picture, strength, sign: picture.rotate(sign * 30 * strength, Image.Resampling.NEAREST),
    "brightness": lambda picture, strength, sign: _enhance(ImageEnhance.Brightness, picture, strength, sign),
    "color": lambda picture, strength, sign: _enhance(ImageEnhance.Color, picture, strength, sign),
    "contrast": lambda picture, strength, sign: _enhance(ImageEnhance.Contrast, picture, strength, sign),
    "sharpness": lambda picture, strength, sign: _enhance(ImageEnhance.Sharpness, picture, strength, sign),
    "posterize": lambda picture, strength, sign: ImageOps.posterize(picture, 8 - int(4 * strength + 0.5)),
    "solarize": lambda picture, strength, sign: ImageOps.solarize(picture, math.ceil(255 - 255 * strength)),
    "autocontrast": lambda picture, strength, sign: ImageOps.autocontrast(picture),
    "equalize": lambda picture, strength, sign: ImageOps.equalize(picture),
}


def _shift(extent: int, strength: float, sign: int) -> int:
    return sign * int(150 / 331 * extent * strength)


def _enhance(kind: Callable[[Picture], ImageEnhance._Enhance], picture: Picture, strength: float, sign: int) -> Picture:
    return kind(picture).enhance(1 + sign * 0.9 * strength)


def draws(count: int, seed: int, lane_pass: int, sample: int) -> list[tuple[str, int]]:
    """The names and signs of the operations that a sample gets in a lane pass.

    >>> draws(2, seed=0, lane_pass=0, sample=0) == draws(2, seed=0, lane_pass=0, sample=0)
    True
    """
    names = list(OPERATIONS)
    numbers = uniform(seed, Stream.RANDAUGMENT, lane_pass, sample, np.arange(count))
    return [(names[int(which * len(names))], 1 if sign < 0.5 else -1) for which, sign, *_ in numbers.tolist()]


def apply(
    pixels: NDArray[np.uint8], count: int, magnitude: float, seed: int, lane_pass: int, sample: int
) -> NDArray[np.uint8]:
    """`count` operations of strength `magnitude` (0 to 30) on one picture, uint8 [height, width, 3]."""
    picture = Image.fromarray(pixels)
    for name, sign in draws(count, seed, lane_pass, sample):
        picture = OPERATIONS[name](picture, magnitude / STRONGEST, sign)
    return np.asarray(picture)


def apply_batch(
    images: NDArray[np.uint8],
    count: int,
    magnitude: float,
    seed: int,
    passes: NDArray[np.integer],
    samples: NDArray[np.integer],
    pool: Executor | None = None,
) -> None:
    """`apply` to each of images [n, height, width, 3], in place, in parallel where there is a pool."""

    def some(part: slice) -> None:
        for i in range(part.start, part.stop):
            images[i] = apply(images[i], count, magnitude, seed, int(passes[i]), int(samples[i]))

    if count:
        spread(pool, some, len(images), PICTURES_PER_TASK)
