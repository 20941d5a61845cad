"""Writers of image folders with photo-like images."""

import numpy as np
from PIL import Image

SPLITS = ("train", "val")


def make_pixels(seed, width, height):
    """Return smooth colors and some noise, as in photos."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return np.clip(np.asarray(coarse) + rng.normal(0, 12, (height, width, 3)), 0, 255).astype(np.uint8)


def save_image(path, seed, width, height, mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(make_pixels(seed, width, height)).convert(mode).save(path, **options)


def make_exif(orientation):
    exif = Image.Exif()
    exif[274] = orientation
    return exif


def write_photos(root):
    """Write every kind of image, larger and smaller than 100 pixels, with names that tar keys cannot hold."""
    for number, split in enumerate(SPLITS):
        seed = 100 * number
        save_image(root / split / "ant" / "a.jpg", seed, 160, 120, quality=92)
        save_image(root / split / "ant" / "b.progressive.scan.jpeg", seed + 1, 140, 150, quality=85, progressive=True)
        save_image(
            root / split / "ant" / "b.progressive.jpeg", seed + 2, 90, 70, quality=95, subsampling=0, progressive=True
        )
        save_image(root / split / "bee é" / "gray.jpg", seed + 3, 131, 97, "L", quality=90)
        save_image(root / split / "bee é" / "turned 1.JPG", seed + 4, 150, 110, quality=90, exif=make_exif(6))
        save_image(root / split / "bee é" / "turned 2.jpg", seed + 5, 60, 80, quality=90, exif=make_exif(3))
        save_image(root / split / "cat" / "inks.jpg", seed + 6, 120, 80, "CMYK", quality=90)
        save_image(root / split / "cat" / "p.png", seed + 7, 110, 60)
        save_image(root / split / "cat" / "q.png", seed + 8, 50, 60)
        save_image(root / split / "cat" / "w.webp", seed + 9, 120, 110, quality=80)
    return root


def write_many(root, count=18):
    """Write images of noise, so that a shard of 1 MiB holds only a few."""
    rng = np.random.default_rng(0)
    for split, n in (("train", count), ("val", count // 2)):
        for i in range(n):
            path = root / split / "ab"[i % 2] / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (400, 500, 3), np.uint8)).save(
                path, quality=95, progressive=i % 3 == 0
            )
    return root
