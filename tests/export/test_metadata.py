"""The preprocessing that exported files describe gives exactly the pixels that Podscale sees."""

import numpy as np
import pytest
from PIL import Image

from podscale.data.index.dataset import index_files
from podscale.data.loader import load_eval_images
from podscale.export.metadata import describe_preprocessing
from podscale.recipe import load_recipe

SIZES = [(500, 375), (97, 301), (64, 64), (640, 31), (20, 45)]


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
    expected = load_eval_images(index_files(paths).limit_size(shrink), list(range(len(paths))), recipe)
    code = describe_preprocessing(recipe.data)["pillow"]
    for path, pixels in zip(paths, expected, strict=True):
        names = {"path": path}
        exec(code, names)
        np.testing.assert_array_equal(names["pixels"][0], pixels)
