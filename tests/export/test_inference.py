"""A trained run classifies images from files, folders and lists; an unreadable image does not affect the others."""

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from podscale.cli.main import main
from podscale.data.image_files import list_image_files
from podscale.errors import UserError
from podscale.export import inference
from podscale.runs.folder import Run
from podscale.training import step as steps


@pytest.fixture(scope="module")
def run(short_run):
    """A short run on digits."""
    return Run.load(short_run)


def save_image(path, seed=0, size=(11, 9)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    return str(path)


def test_folders_list_their_images_in_order_and_nothing_else(tmp_path):
    names = ["b/2.png", "b/1.JPG", "a.webp", "c/d/e.jpeg", "z.ppm"]
    for name in names:
        save_image(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    save_image(tmp_path / ".hidden" / "x.png")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    expected = [str(tmp_path / name) for name in ("a.webp", "b/1.JPG", "b/2.png", "c/d/e.jpeg", "z.ppm")]
    assert list_image_files([tmp_path]) == expected
    assert list_image_files([tmp_path / "z.ppm", tmp_path / "b"]) == [expected[4], *expected[1:3]]


def test_a_list_names_one_path_per_line(tmp_path):
    folder = tmp_path / "two words"
    save_image(folder / "a.png")
    lines = io.StringIO(f"gone.png\n\n{folder}\r\n{folder / 'a.png'}")
    assert list_image_files(["-"], lines) == ["gone.png", str(folder / "a.png"), str(folder / "a.png")]


@pytest.mark.parametrize(("path", "message"), [("gone.png", "no image file gone.png"), (".", "holds no images")])
def test_missing_images_are_refused(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        list_image_files([path])
    with pytest.raises(UserError, match="no images are named"):
        list_image_files(["-"], io.StringIO(""))


@pytest.mark.heavy
def test_many_images_are_predicted_in_order_and_as_each_alone(run, tmp_path, monkeypatch):
    """Three batches, the last one padded; one shape, so one compilation."""
    paths, predictors = [save_image(tmp_path / f"{i:03}.png", i) for i in range(130)], []
    make_predictor = steps.make_predictor
    monkeypatch.setattr(
        steps, "make_predictor", lambda *args: predictors.append(make_predictor(*args)) or predictors[-1]
    )
    results = inference.predict(run, [tmp_path])
    assert predictors[0]._cache_size() == 1
    assert [result["image"] for result in results] == paths
    for number in (0, 63, 64, 129):
        (alone,) = inference.predict(run, [paths[number]])
        assert [g["class"] for g in alone["top"]] == [g["class"] for g in results[number]["top"]]
        probabilities = [[g["probability"] for g in ours["top"]] for ours in (alone, results[number])]
        np.testing.assert_allclose(*probabilities, rtol=1e-5)


@pytest.mark.heavy
def test_unreadable_images_do_not_affect_the_others(run, tmp_path):
    for i in range(70):
        save_image(tmp_path / f"{i:03}.png", i)
    expected = inference.predict(run, [tmp_path])
    whole = (tmp_path / "003.png").read_bytes()
    (tmp_path / "003.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "066.png").write_bytes(b"not what it says")
    os.truncate(tmp_path / "069.png", 0)
    results = inference.predict(run, [tmp_path])
    assert [i for i, result in enumerate(results) if "error" in result] == [3, 66, 69]
    assert results[66]["error"].startswith(f"cannot read {tmp_path / '066.png'}: it is neither JPEG")
    for ours, theirs in zip(results, expected, strict=True):
        assert "error" in ours or ours == theirs


@pytest.mark.heavy
def test_the_predict_command_reports_results_then_unreadable_images(run, tmp_path):
    save_image(tmp_path / "a.png")
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
    assert c["error"] == "there is no image file c.png; check the path"
    assert (
        done.stderr.splitlines()[-1]
        == f"podscale: 2 of 3 images could not be read and were skipped; the first: {b['error']}"
    )


@pytest.mark.heavy
def test_readable_images_are_shown_and_unreadable_ones_reported(run, tmp_path, capfd):
    good, bad = save_image(tmp_path / "[red].png"), tmp_path / "bad.png"
    bad.write_bytes(b"")
    assert main(["predict", good, str(bad), "--run", str(run.folder)]) == 2
    shown = capfd.readouterr()
    assert good in shown.out.replace("\n", "")
    assert shown.out.count("%") == 1 + 5  # of the run, and of the five most probable classes
    assert shown.err.splitlines() == [f"podscale: cannot read {bad}: the file is empty; replace or remove it"]
