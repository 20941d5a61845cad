"""The examples run unchanged, each in a folder of its own."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from podscale import Run
from podscale.models import registry

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run_example(tmp_path, monkeypatch, capsys):
    """A function that runs an example and returns its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry.MODELS, "_parts", dict(registry.MODELS))

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_train_from_python_example(run_example):
    output = run_example("train_from_python.py")
    assert "after 68 steps" in output
    assert "the loss went from 2.30" in output
    assert "sample.png shows a" in output


@pytest.mark.slow
def test_callback_example_stops_training(run_example):
    output = run_example("callback.py")
    summary = json.loads(Path("runs/patient/summary.json").read_text())
    assert f"ended after {summary['steps']} steps" in output
    assert output.count("best so far") == round(summary["steps"] / 11.23)


def test_own_model_example(run_example):
    assert "validation accuracy" in run_example("own_model.py")
    assert "plain" in Path("runs/plain/recipe.toml").read_text()


@pytest.mark.slow  # the tutorial, the README and cli/test_main.py train photos, too
def test_own_photos_example(run_example):
    output = run_example("own_photos.py")
    assert "100 images to learn from, of disc, square" in output
    assert Path("samples.png").stat().st_size > 1000
    assert Path("photos.safetensors").is_file()
    assert "made-up-photos/val/disc/0.jpg: disc" in output
    assert Run.load("runs/photos").summary()["accuracy"] > 0.8
