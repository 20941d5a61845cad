"""The preprocessing that exported files describe gives exactly the pixels that Podscale sees."""

import ast
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from podscale.data.index.dataset import index_files
from podscale.data.loader import load_eval_images
from podscale.export.metadata import describe_preprocessing
from podscale.recipe import load_recipe

SIZES = [(500, 375), (97, 301), (64, 64), (640, 31), (20, 45)]


def save_unusual_images(folder, random):
    """Save images with transparency, with a palette and of 16 bits, some of them rotated by EXIF."""
    exif = Image.Exif()
    exif[274] = 6
    rgba = Image.fromarray(random.integers(0, 256, (90, 75, 4), dtype=np.uint8))
    gray16 = Image.fromarray(random.integers(0, 2**16, (90, 75), dtype=np.uint16))
    palette = rgba.convert("RGB").quantize(16)
    images = [
        ("rgba.png", rgba, {"exif": exif}),
        ("rgba.webp", rgba, {"lossless": True}),
        ("gray-alpha.png", rgba.convert("LA"), {}),
        ("palette.png", palette, {}),
        ("palette-one.png", palette, {"transparency": 3, "exif": exif}),
        ("palette-all.png", palette, {"transparency": bytes(range(0, 256, 16))}),
        ("rgb-one.png", Image.new("RGB", (30, 40), (9, 8, 7)), {"transparency": (9, 8, 7)}),
        ("gray-one.png", rgba.convert("L"), {"transparency": 100}),
        ("gray16.png", gray16, {"exif": exif}),
        ("gray16-one.png", gray16, {"transparency": gray16.getpixel((40, 50))}),
        ("cmyk.jpg", rgba.convert("RGB").convert("CMYK"), {}),
    ]
    for name, image, options in images:
        image.save(folder / name, **options)
    return [folder / name for name, _, _ in images]


@pytest.mark.parametrize("shrink", [0, 120])
@pytest.mark.parametrize("fraction", [0.875, 1.0])
@pytest.mark.parametrize("decoder", ["native", "plain"])
def test_the_pillow_code_in_the_metadata_gives_the_same_pixels(tmp_path, monkeypatch, shrink, fraction, decoder):
    monkeypatch.setenv("PODSCALE_DECODER", decoder)
    changes = {"data.image_size": 64, "data.eval_fraction": fraction, "data.shrink": shrink}
    recipe = load_recipe("imagefolder").override(changes)
    paths, random = [], np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        path = tmp_path / f"{number}.{'png' if number % 2 else 'jpg'}"
        exif = Image.Exif()
        exif[274] = 1 + number
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path, exif=exif, **({} if number % 2 else {"quality": 90}))
        paths.append(path)
    paths += save_unusual_images(tmp_path, random)
    expected = load_eval_images(index_files(paths).limit_size(shrink), list(range(len(paths))), recipe)
    code = describe_preprocessing(recipe.data)["pillow"]
    for path, pixels in zip(paths, expected, strict=True):
        names = {"path": path}
        exec(code, names)
        np.testing.assert_array_equal(names["pixels"][0], pixels, path.name)


def test_the_tutorial_shows_the_pillow_code_of_its_model():
    page = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
    shown = textwrap.dedent(page.partition("def load_pixels(path):\n")[2].partition("    return ")[0])
    code = describe_preprocessing(load_recipe("imagefolder-small").data)["pillow"].splitlines()
    assert ast.dump(ast.parse(shown)) == ast.dump(ast.parse("\n".join(code[2:-1])))
