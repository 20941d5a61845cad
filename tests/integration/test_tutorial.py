"""The tutorial, as a new user follows it: its own commands and its own program, in a fresh folder."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.command_line import run_json, run_podscale

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()]
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
QUICK = ("--train.epochs", "0.5", "--model.width", "8")


def find_command(start):
    (line,) = [line for line in COMMANDS if line.startswith(start)]
    return shlex.split(line)[1:]


@pytest.fixture(scope="module")
def photos():
    return runpy.run_path(str(ROOT / "examples" / "make_photos.py"))


def test_every_screenshot_that_pages_show_exists_and_is_small():
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"\]\((images/[^)]+)\)", page.read_text()):
            assert (ROOT / "docs" / name).stat().st_size < 100_000, name
            with Image.open(ROOT / "docs" / name) as image:
                image.verify()


def test_rendered_photos_have_the_flaws_that_the_tutorial_shows(tmp_path, photos):
    photos["COUNTS"].update(apple=10, banana=10, orange=10, pear=4, plum=40)
    photos["make_photos"](tmp_path / "fruit")
    done = run_podscale(tmp_path, *find_command("podscale data check"))
    assert done.returncode == 1
    assert "fruit/plum/IMG_0031.jpg: image file is truncated" in done.stdout
    assert "IMG_0080 (copy).jpg is also in training" in done.stdout
    assert "imbalanced classes in train: 32 images of plum, 3 of pear" in done.stdout


@pytest.mark.slow
def test_the_tutorial_works_as_written(tmp_path):
    subprocess.run([sys.executable, ROOT / find_command("python examples")[0], "fruit"], cwd=tmp_path, check=True)
    subprocess.run(["bash", "-c", shlex.join(["rm", *find_command("rm ")])], cwd=tmp_path, check=True)
    assert run_podscale(tmp_path, *find_command("podscale data check")).returncode == 0
    assert run_podscale(tmp_path, *find_command("podscale data show")).returncode == 0
    assert (tmp_path / "samples.png").exists()
    assert run_podscale(tmp_path, *find_command("podscale train"), *QUICK).returncode == 0
    predicted = run_json(tmp_path, *find_command("podscale predict"), "--json")["images"][0]["top"]
    assert run_podscale(tmp_path, *find_command("podscale export")).returncode == 0
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True)
    label, probability = done.stdout.split()
    assert label == predicted[0]["class"]
    np.testing.assert_allclose(float(probability), predicted[0]["probability"], atol=1e-5)
