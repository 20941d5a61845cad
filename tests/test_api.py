"""The names that Python users meet."""

import subprocess
import sys

import jax
import pytest
from rich.console import Console

import podscale


def test_every_public_name_is_there_and_they_are_few():
    assert len(podscale.__all__) <= 25
    assert all(getattr(podscale, name) is not None for name in podscale.__all__)
    assert set(podscale.__all__) <= set(dir(podscale))
    with pytest.raises(AttributeError, match="no 'trian'"):
        _ = podscale.trian


def test_importing_the_package_does_not_import_jax():
    program = "import sys, podscale; podscale.load_recipe('digits'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_example_of_the_package_trains(tmp_path):
    recipe = podscale.load_recipe("digits").override({"train.epochs": 1, "model.width": 8})
    summary = podscale.train(
        recipe, pod=podscale.find_pod(virtual="2x2"), folder=tmp_path / "run", console=Console(quiet=True)
    )
    assert summary["steps"] == 12
    run = podscale.Run.load(tmp_path / "run")
    assert run.recipe == recipe
    found = podscale.evaluate(run, podscale.find_pod(virtual="1x2"), podscale.Options(), "newest")
    assert (found["accuracy"], found["examples"]) == (summary["accuracy"], 360)
    guesses = podscale.predict(run, [str(tmp_path / "run" / "sample.png")])[0]["top"]
    assert [len(guesses), sum(g["probability"] for g in guesses) <= 1] == [5, True]
    assert jax.device_count() == 16  # virtual pods share the session's devices
