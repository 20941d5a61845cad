"""Rehearse a whole run on ImageNet: steps, learning rate, evaluations, checkpoint and the order of 1.28 million images.

Makes a data set of ImageNet's exact counts, 1,281,167 training and 50,000 validation images of 1,000 classes, out of a
few thousand small JPEGs: one tar shard per split, and an index in which many samples are the same bytes. Then runs
`podscale rehearse` on a virtual pod with it, and counts the steps by hand.

    python benchmarks/imagenet_rehearsal.py [RECIPE] [--pod 2x2] [--epochs 91]
"""

import argparse
import io
import json
import math
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from podscale import recipe as recipes
from podscale.data.index import catalog, table
from podscale.planner import rehearsal

COUNTS = {"train": 1_281_167, "val": 50_000}
CLASSES = 1000
IMAGE_SIZE = (32, 24)

STORED = {"train": 4000, "val": 1000}  # images that really exist; each class has some in both splits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="resnet50-imagenet-32k")
    parser.add_argument("--pod", default="2x2", help="a virtual pod")
    parser.add_argument("--epochs", type=float, default=91.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="podscale-imagenet-") as folder:
        write_data_set(Path(folder))
        command = [sys.executable, "-m", "podscale", "rehearse", arguments.recipe, "--pod.virtual", arguments.pod]
        command += ["--data.source", "tar", "--data.path", folder, "--train.epochs", str(arguments.epochs), "--json"]
        process = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result = json.loads(process.stdout)
    for name, value in rehearsal.format_rows(result):
        print(f"{name:<14} {value}")
    batch = recipes.load_recipe(arguments.recipe).batch.size
    expected = math.ceil(arguments.epochs * COUNTS["train"] / batch)
    print(f"steps by hand: {arguments.epochs:g} x {COUNTS['train']:,} / {batch:,} = {expected:,}")
    if result["steps"] != expected or result["order"]["drawn_twice"]:
        raise SystemExit("the rehearsal counts other steps")


def write_data_set(folder: Path) -> None:
    """Write the shards, and an index beside them that has as many samples as ImageNet."""
    random = np.random.default_rng(0)
    for split, count in STORED.items():
        (folder / split).mkdir(parents=True)
        with tarfile.open(folder / split / f"{split}-000000.tar", "w") as shard:
            for i in range(count):
                add_member(shard, f"{i:06}.jpg", encode_jpeg(random))
                add_member(shard, f"{i:06}.cls", str(i % CLASSES).encode())
    path = catalog.store_beside("tar", folder)
    stored = table.load_tables(path)
    assert stored is not None
    splits = {split: getattr(stored, split).select(np.arange(COUNTS[split]) % STORED[split]) for split in COUNTS}
    table.save_tables(path, replace(stored, **splits))


def encode_jpeg(random: np.random.Generator) -> bytes:
    out = io.BytesIO()
    small = Image.fromarray(random.integers(0, 256, (4, 4, 3), np.uint8))
    small.resize(IMAGE_SIZE, Image.Resampling.BICUBIC).save(out, "jpeg", quality=60)
    return out.getvalue()


def add_member(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main()
