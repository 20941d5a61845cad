"""Render photos of fruit to practise on: a folder per class, with the flaws that real folders have.

    python examples/make_photos.py fruit

Five classes; pear has a third as many photos as the others, one file is damaged and one is there twice.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

SIDE = 160
COUNTS = {"apple": 80, "banana": 80, "orange": 80, "pear": 27, "plum": 80}
SKINS = {  # two colours of each fruit's skin; every photo has a mixture of them
    "apple": ((166, 28, 34), (190, 170, 60)),
    "banana": ((238, 205, 60), (190, 196, 72)),
    "orange": ((226, 120, 24), (200, 70, 40)),
    "pear": ((170, 184, 62), (214, 190, 84)),
    "plum": ((78, 32, 84), (168, 36, 44)),
}


def make_noise(random, cells):
    """Return smooth noise in 0..1."""
    coarse = Image.fromarray(random.random((cells, cells), np.float32))
    return np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def make_depth(kind, x, y):
    """Return how far inside the fruit each pixel is, as a share of its radius; below 0 outside."""
    r = np.hypot(x, y)
    if kind == "banana":
        bend = np.clip(np.arctan2(x, y + 0.9), -0.85, 0.85)  # along a part of a circle, thinner towards its ends
        return 0.32 - 0.14 * (bend / 0.85) ** 2 - np.hypot(x - 1.15 * np.sin(bend), y + 0.9 - 1.15 * np.cos(bend))
    if kind == "pear":
        body, neck = 0.68 - np.hypot(x, y - 0.3), 0.4 - np.hypot(x, y + 0.45)
        return np.logaddexp(9 * body, 9 * neck) / 9  # a smooth union
    if kind == "apple":
        return 0.9 - r - 0.22 * np.exp(-(x**2) / 0.04) * (y < 0) - 0.06 * np.cos(2 * np.arctan2(y, x))
    return 0.86 - np.hypot(x, (1.2 if kind == "plum" else 1.0) * y)


def render_photo(kind, random):
    """Return one photo as an image."""
    size, angle = random.uniform(22, 60), random.normal(0, 0.35) + (random.uniform(-1, 1) if kind == "banana" else 0)
    centre = random.uniform(SIDE / 2 - 24, SIDE / 2 + 24, 2)
    v, u = (np.mgrid[:SIDE, :SIDE] - centre[:, None, None]) / size
    x, y = u * np.cos(angle) + v * np.sin(angle), v * np.cos(angle) - u * np.sin(angle)

    table = np.array([random.uniform(90, 225)] * 3) * random.uniform(0.75, 1.1, 3)
    shade = 0.75 + 0.3 * make_noise(random, 3) + 0.16 * make_noise(random, 24)
    photo = table * shade[..., None]

    shadow = make_depth(kind, x - 0.22, y - 0.28) > 0
    blurred = Image.fromarray((255 * shadow).astype(np.uint8)).filter(ImageFilter.GaussianBlur(7))
    photo *= 1 - 0.5 * np.asarray(blurred)[..., None] / 255

    depth = make_depth(kind, x, y)
    first, second = (np.array(colour, float) for colour in SKINS[kind])
    share = np.clip(random.beta(0.7, 1.1) + 0.5 * (make_noise(random, 5) - 0.5), 0, 1)[..., None]
    skin = (first * (1 - share) + second * share) * random.uniform(0.85, 1.1)
    skin = skin * (0.9 + 0.2 * make_noise(random, 60 if kind == "orange" else 12))[..., None]
    bulge = np.sqrt(np.clip(depth / max(depth.max(), 1e-6), 0, 1))
    light = 0.45 + 0.65 * bulge - 0.22 * (x * 0.6 + y * 0.8)
    gleam = 90 * np.exp(-((x + 0.3) ** 2 + (y + 0.35) ** 2) / 0.03) * (depth > 0.1)
    photo = np.where(depth[..., None] > 0, skin * light[..., None] + gleam[..., None], photo)
    if kind in ("apple", "pear"):
        stem = (np.abs(x - 0.12 * (y + 0.7)) < 0.05) & (y < -0.55) & (y > -1.15)
        photo = np.where(stem[..., None], np.array((84, 58, 30)) * shade[..., None], photo)
    photo = photo * random.uniform(0.55, 1.15) * random.uniform(0.75, 1.25, 3)  # exposure and white balance
    photo += random.normal(0, 9, photo.shape)
    soft = Image.fromarray(np.clip(photo, 0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.7))
    width = int(random.integers(120, SIDE))
    return soft.resize((width, int(width * random.uniform(0.85, 1.15))))


def make_photos(folder):
    """Write the photos to FOLDER/CLASS/IMG_NUMBER.jpg and return the folder."""
    random = np.random.default_rng(7)
    for kind, count in COUNTS.items():
        class_folder = Path(folder) / kind
        class_folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            render_photo(kind, random).save(class_folder / f"IMG_{number:04}.jpg", quality=90)
    damaged, original = Path(folder) / "plum" / "IMG_0031.jpg", Path(folder) / "orange" / "IMG_0007.jpg"
    damaged.write_bytes(damaged.read_bytes()[:900])
    (original.parent / "IMG_0080 (copy).jpg").write_bytes(original.read_bytes())
    return Path(folder)


if __name__ == "__main__":
    make_photos(sys.argv[1] if len(sys.argv) > 1 else "fruit")
