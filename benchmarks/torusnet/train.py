"""Claim: over a slow torus, a training step gets shorter from `xla` to `torus4` by what the model of time predicts.

ResNet-18 on the digits, with batch norm over tiles of 2x2 hosts, trained by `podscale train` as a process a host over a
network of namespaces on this machine (`network.py`): first with Gloo's all-reduce, then with `torus4` and a device for
each of its four paths. What should change is predicted from messages timed on the same network (`probe.py`): the sums
of gradients and of batch-norm moments, and batch norm's own messages, over tiles that have four times as many devices.
Needs root.

    python benchmarks/torusnet/train.py [--shape 4x4] [--mbit 5] [--delay-us 2000] [--width 24] [--steps 6]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from network import Torus, Wires, idle_share

IMAGES = 16  # on a host: a batch-norm tile of 2x2 hosts has 64
CORES = {"xla": 1, "torus": 1, "torus4": 4}  # devices of a process
PROBE = """
import json, math, sys
from podscale.parallel import batch_norm as norm
from podscale import plan, pod
from podscale.processes import group
from podscale import recipe as recipes
from podscale.forecast import probe
from podscale.forecast.compute import count_work

number, first, cores, strategy, width = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
shape = sys.argv[6]
group.join(first, math.prod(map(int, shape.split("x"))), number)
here = pod.find_pod(shape, cores=cores)
recipe = recipes.override_recipe(recipes.load_recipe("digits"), {"model.name": "resnet18", "model.width": width})
work = count_work(recipe, 10)
links = probe.measure_links(here)
sums = links.predict_summation_s(strategy, 4 * work.parameters) + links.predict_summation_s(strategy, 8 * work.norm_channels)
message, groups = 8 * work.norm_channels // work.norms, plan.make_tiled_groups(here, 1)

def messages(x):  # in a row, as in training; by itself one would be as late as the last process to begin
    for _ in range(2 * work.norms):
        x = norm.over_tile(x, groups) / here.size
    return x

norms, _ = probe.time_on_mesh(here.mesh((2, 2)), messages, message)
print(json.dumps({"sums_s": sums, "norms_s": norms, "parameters": work.parameters}))
group.leave()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", metavar="RxC", default="4x4", help="even numbers")
    parser.add_argument("--mbit", type=float, default=5.0)
    parser.add_argument("--delay-us", type=float, default=2000.0)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--strategies", default="xla,torus4")
    parser.add_argument("--minutes", type=float, default=12.0, help="for each part; then it gives up")
    arguments = parser.parse_args()
    print(f"{idle_share():.0%} of the cores' time is idle before the start", flush=True)
    found: dict[str, dict[str, Any]] = {}
    rows, cols = map(int, arguments.shape.split("x"))
    with Torus(rows, cols, Wires(arguments.mbit, arguments.mbit, arguments.delay_us)) as torus:
        for strategy in arguments.strategies.split(","):
            predicted = predict(torus, strategy, CORES[strategy], arguments)
            print(strategy, json.dumps(predicted), flush=True)
            found[strategy] = predicted | trained(torus, strategy, CORES[strategy], arguments)
            print(strategy, json.dumps(found[strategy]), flush=True)
    print(torus.late)
    tell(found)


def predict(torus: Torus, strategy: str, cores: int, arguments: argparse.Namespace) -> dict[str, float]:
    port = 20000 + int(time.time()) % 20000

    def command(number: int, first: str) -> list[str]:
        words = [str(number), f"{first}:{port}", str(cores), strategy, str(arguments.width), arguments.shape]
        return [sys.executable, "-c", PROBE, *words]

    return json.loads(torus.run(command, 60 * arguments.minutes, {"JAX_PLATFORMS": "cpu"})[0].splitlines()[-1])


def trained(torus: Torus, strategy: str, cores: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step, all but the first: the median, the shortest and the longest."""
    port = 20000 + int(time.time()) % 20000
    images = IMAGES * len(torus.hosts)
    epochs = (arguments.steps - 0.5) * images / 1437
    recipe = f"digits --model.name resnet18 --model.width {arguments.width} --batch.size {images} --batch.span 64"
    recipe += f" --train.epochs {epochs} --train.eval_epochs {epochs} --schedule.warmup_epochs 0"
    machine = f"--pod.shape {arguments.shape} --pod.cores {cores} --plan.summation {strategy} --plan.bucket_mib 0"
    machine += " --pod.heartbeat_s 900"  # sixteen processes compile on a few cores: signs of life come late
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"

        def command(number: int, first: str) -> list[str]:
            joins = f"--coordinator {first}:{port} --processes {len(torus.hosts)} --process {number} --run {run}"
            return [sys.executable, "-m", "podscale", "train", *f"{recipe} {machine} {joins}".split()]

        torus.run(command, 60 * arguments.minutes, {"JAX_PLATFORMS": "cpu"})
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [images / line["images_per_s"] for line in lines if line["event"] == "train" and line["images_per_s"]]
    del times[0]
    return {"step_s": statistics.median(times), "shortest_s": min(times), "longest_s": max(times)}


def tell(found: dict[str, dict[str, Any]]) -> None:
    """What was predicted and measured, and by how much a step got shorter since the first strategy."""
    talk = {name: one["sums_s"] + one["norms_s"] for name, one in found.items()}
    first = next(iter(found))
    for name, one in found.items():
        spread = f"{one['shortest_s']:.2f} to {one['longest_s']:.2f}"
        line = f"{name:8}messages {talk[name]:6.2f} s predicted, step {one['step_s']:6.2f} s ({spread})"
        if name != first:
            fell, predicted = found[first]["step_s"] - one["step_s"], talk[first] - talk[name]
            line += f", {fell:.2f} s less; predicted {predicted:.2f} s less: {fell / predicted:.2f} of it"
        print(line)


if __name__ == "__main__":
    main()
