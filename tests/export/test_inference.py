"""Pictures of one's own, named by a trained run: files, folders, lists; one bad picture takes nothing from the rest."""

import io
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from podscale import pod as pods
from podscale import recipe as recipes
from podscale.cli.main import main
from podscale.data.image_files import listed
from podscale.errors import UserError
from podscale.export import inference
from podscale.runs.folder import Run
from podscale.training import loop
from podscale.training import step as steps


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on digits that has learnt next to nothing."""
    folder = tmp_path_factory.mktemp("predict") / "run"
    recipe = recipes.load("digits").override({"model.width": 8, "train.epochs": 0.2})
    loop.train(recipe, pod=pods.of(jax.devices(), "1x1"), folder=folder, console=Console(quiet=True))
    return Run.load(folder)


def save(path, seed=0, size=(11, 9)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    return str(path)


def test_folders_give_their_pictures_and_nothing_else_in_order(tmp_path):
    names = ["b/2.png", "b/1.JPG", "a.webp", "c/d/e.jpeg", "z.ppm"]
    for name in names:
        save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    save(tmp_path / ".hidden" / "x.png")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    expected = [str(tmp_path / name) for name in ("a.webp", "b/1.JPG", "b/2.png", "c/d/e.jpeg", "z.ppm")]
    assert listed([tmp_path]) == expected
    assert listed([tmp_path / "z.ppm", tmp_path / "b"]) == [expected[4], *expected[1:3]]


def test_a_list_gives_its_lines(tmp_path):
    folder = tmp_path / "two words"
    save(folder / "a.png")
    lines = io.StringIO(f"gone.png\n\n{folder}\r\n{folder / 'a.png'}")
    assert listed(["-"], lines) == ["gone.png", str(folder / "a.png"), str(folder / "a.png")]


@pytest.mark.parametrize(("path", "words"), [("gone.png", "no picture file gone.png"), (".", "holds no pictures")])
def test_what_is_named_and_not_there_is_refused(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        listed([path])
    with pytest.raises(UserError, match="no pictures are named"):
        listed(["-"], io.StringIO(""))


def test_many_pictures_are_predicted_in_order_as_each_alone(run, tmp_path, monkeypatch):
    """Three batches, the last one padded; one shape, so one compilation."""
    paths, made = [save(tmp_path / f"{i:03}.png", i) for i in range(130)], []
    predictor = steps.predictor
    monkeypatch.setattr(steps, "predictor", lambda *args: made.append(predictor(*args)) or made[-1])
    found = inference.predict(run, [tmp_path])
    assert made[0]._cache_size() == 1
    assert [picture["image"] for picture in found] == paths
    for number in (0, 63, 64, 129):
        (alone,) = inference.predict(run, [paths[number]])
        assert [g["class"] for g in alone["top"]] == [g["class"] for g in found[number]["top"]]
        chances = [[g["probability"] for g in one["top"]] for one in (alone, found[number])]
        np.testing.assert_allclose(*chances, rtol=1e-5)


def test_pictures_that_cannot_be_read_take_nothing_from_the_others(run, tmp_path):
    for i in range(70):
        save(tmp_path / f"{i:03}.png", i)
    expected = inference.predict(run, [tmp_path])
    whole = (tmp_path / "003.png").read_bytes()
    (tmp_path / "003.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "066.png").write_bytes(b"not what it says")
    os.truncate(tmp_path / "069.png", 0)
    found = inference.predict(run, [tmp_path])
    assert [i for i, picture in enumerate(found) if "error" in picture] == [3, 66, 69]
    assert found[66]["error"].startswith(f"cannot read {tmp_path / '066.png'}: it is neither JPEG")
    for one, other in zip(found, expected, strict=True):
        assert "error" in one or one == other


def test_the_command_tells_all_it_could_and_then_what_it_could_not(run, tmp_path):
    save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-m", "podscale", "predict", "-", "--run", run.folder, "--json"],
        input="a.png\nb.png\nc.png\n",
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    a, b, c = json.loads(done.stdout)["images"]
    assert len(a["top"]) == 5
    assert b == {"image": "b.png", "error": "cannot read b.png: the file is empty; replace or remove it"}
    assert c["error"] == "there is no picture file c.png; check the path"
    assert done.stderr.splitlines()[-1] == f"podscale: 2 of 3 pictures were left out; the first: {b['error']}"


def test_people_see_the_pictures_that_could_be_read(run, tmp_path, capfd):
    good, bad = save(tmp_path / "[red].png"), tmp_path / "bad.png"
    bad.write_bytes(b"")
    assert main.main(["predict", good, str(bad), "--run", str(run.folder)]) == 2
    shown = capfd.readouterr()
    assert good in shown.out.replace("\n", "")
    assert shown.out.count("%") == 5
    assert shown.err.splitlines() == [f"podscale: cannot read {bad}: the file is empty; replace or remove it"]
