"""What only a GPU can show. Every training is a separate process, because JAX runs on the CPU in this one."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from podscale.runs.folder import Run

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA GPU here")

# ResNet-50 with its max-pool, whose backward pass is a scatter, in bfloat16.
SETTINGS = "--data.image_size 64 --batch.size 64 --batch.span 32 --train.epochs 6 --train.eval_epochs 2"


def train(folder, data, *more):
    command = [sys.executable, "-m", "podscale", "train", "imagefolder", "--data.source", "npz", "--data.path", data]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    subprocess.run([*command, *SETTINGS.split(), "--run", str(folder), *more], env=environment, check=True)
    return [(m["step"], m["loss"]) for m in Run.load(folder).metrics() if m["event"] == "train"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "noise.npz"
    images, labels = random.integers(0, 256, (1280, 72, 72, 3), np.uint8), random.integers(0, 4, 1280)
    np.savez(
        path, train_images=images[:1024], train_labels=labels[:1024], val_images=images[1024:], val_labels=labels[1024:]
    )
    return str(path)


def test_deterministic_run_that_stops_and_resumes_is_bit_identical(data, tmp_path):
    deterministic = ("--plan.deterministic", "true")
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    assert len(train(stopped, data, *deterministic, "--until", "accuracy=0.0")) == 32
    resumed = train(stopped, data, *deterministic)
    whole.mkdir()
    shutil.copy(stopped / "recipe.toml", whole)
    shutil.copytree(stopped / "programs", whole / "programs")  # the same programs, but no checkpoint yet
    assert any((whole / "programs").iterdir())
    assert train(whole, data, *deterministic) == resumed
    assert len(resumed) == 96
