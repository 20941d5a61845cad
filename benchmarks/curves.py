"""Claim: a run with fused layers and one without have the same loss curve, as far as bfloat16 lets any two have it.

Trains a recipe on real photos three times from the same seed: as modules in bfloat16, with fused layers in bfloat16,
and as modules in float32. The difference between the first two is reported beside the difference between the first and
the last, which is the same network computed with more digits.

    python benchmarks/curves.py PHOTOS [--steps 200] [--batch 128] [--size 128] [--fused on] [--recipe imagefolder]
        [--set schedule.peak=0.025]
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

WINDOW = 20  # updates that are averaged, so that not single batches are compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--fused", default="on")
    parser.add_argument("--recipe", default="imagefolder")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="other fields of the recipe")
    arguments = parser.parse_args()
    variants = {
        "modules, bfloat16": {"plan.fused": "off"},
        "fused, bfloat16": {"plan.fused": arguments.fused},
        "modules, float32": {"plan.fused": "off", "model.precision": "float32"},
    }
    curves = {name: train_curve(arguments, changes) for name, changes in variants.items()}
    windows = range(0, arguments.steps - WINDOW + 1, WINDOW)
    print(f"mean loss over {WINDOW} updates{'':6}" + "".join(f"{start + WINDOW:>8}" for start in windows))
    means = {name: [sum(c[i : i + WINDOW]) / WINDOW for i in windows] for name, c in curves.items()}
    for name, values in means.items():
        print(f"{name:32}" + "".join(f"{value:8.4f}" for value in values))
    base, fused, exact = means.values()
    print(f"root mean square of the differences between the first two: {compute_rms_difference(base, fused):.4f}")
    print(f"and between the first and the last: {compute_rms_difference(base, exact):.4f}")


def train_curve(arguments: argparse.Namespace, changes: dict[str, str]) -> list[float]:
    """Return the loss of every update."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "podscale", "train", arguments.recipe, "--run", str(run), "--json"]
        fields = {
            "data.path": arguments.photos,
            "data.image_size": arguments.size,
            "batch.size": arguments.batch,
            "batch.span": min(64, arguments.batch),
            "plan.steps_per_call": 1,
        } | dict(field.split("=", 1) for field in arguments.set)
        fields |= changes
        fields |= {"train.epochs": count_epochs(arguments), "train.eval_epochs": count_epochs(arguments)}
        command += [argument for name, value in fields.items() for argument in (f"--{name}", str(value))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"][: arguments.steps]


def count_epochs(arguments: argparse.Namespace) -> float:
    """Return the epochs that give `--steps` updates, which the plan rounds up."""
    photos = sum(1 for file in (Path(arguments.photos) / "train").rglob("*") if file.is_file())
    return (arguments.steps - 0.5) * arguments.batch / photos


def compute_rms_difference(first: list[float], other: list[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(first, other, strict=True)) / len(first))


if __name__ == "__main__":
    main()
