"""Claim: a run with fused layers and one without have the same loss curve, as far as bfloat16 lets any two have it.

Trains a recipe on real photos three times from the same seed: as modules in bfloat16, with fused layers in bfloat16,
and as modules in float32. How far the first two are apart is told beside how far the first and the last are: the same
network, computed with more digits.

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

WINDOW = 20  # updates that are averaged, or single batches would be compared


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
    ways = {
        "modules, bfloat16": {"plan.fused": "off"},
        "fused, bfloat16": {"plan.fused": arguments.fused},
        "modules, float32": {"plan.fused": "off", "model.precision": "float32"},
    }
    curves = {name: curve(arguments, changes) for name, changes in ways.items()}
    windows = range(0, arguments.steps - WINDOW + 1, WINDOW)
    print(f"mean loss over {WINDOW} updates{'':6}" + "".join(f"{start + WINDOW:>8}" for start in windows))
    means = {name: [sum(c[i : i + WINDOW]) / WINDOW for i in windows] for name, c in curves.items()}
    for name, values in means.items():
        print(f"{name:32}" + "".join(f"{value:8.4f}" for value in values))
    base, fused, exact = means.values()
    print(f"root mean square of the differences between the first two: {apart(base, fused):.4f}")
    print(f"and between the first and the last: {apart(base, exact):.4f}")


def curve(arguments: argparse.Namespace, changes: dict[str, str]) -> list[float]:
    """The loss of every update."""
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
        fields |= {"train.epochs": epochs(arguments), "train.eval_epochs": epochs(arguments)}
        command += [word for name, value in fields.items() for word in (f"--{name}", str(value))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"][: arguments.steps]


def epochs(arguments: argparse.Namespace) -> float:
    """As many as give the updates that were asked for, rounded up as the plan does."""
    photos = sum(1 for file in (Path(arguments.photos) / "train").rglob("*") if file.is_file())
    return (arguments.steps - 0.5) * arguments.batch / photos


def apart(one: list[float], other: list[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one))


if __name__ == "__main__":
    main()
