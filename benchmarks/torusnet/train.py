"""Claim: over a slow torus, a training step gets shorter from `xla` to `torus4` by what the model of time predicts.

ResNet-18 on the digits, with batch norm over tiles of 2x2 hosts, is trained by `podscale train` with one process per
host over a network of namespaces on this machine (`network.py`): first with Gloo's all-reduce, then with `torus4` and a
device for each of its four paths. The change is predicted from messages timed on the same network (`probe.py`): the
sums of gradients and of batch-norm moments, and batch norm's own messages, over tiles of four times as many devices.
Needs root.

    python benchmarks/torusnet/train.py [--shape 4x4] [--mbit 5] [--delay-us 2000] [--width 24] [--steps 6]
        [--tile-summation xla] [--messages]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from network import Torus, Wires, measure_idle_share

IMAGES = 16  # on a host: a batch-norm tile of 2x2 hosts has 64
CORES = {"xla": 1, "torus": 1, "swing": 1, "swing_latency": 1, "torus4": 4}  # devices of a process
PROBE = """
import json, math, sys
from podscale.parallel import batch_norm as norm
from podscale.pod import find_pod
from podscale.processes import group
from podscale import recipe as recipes
from podscale.forecast import probe
from podscale.forecast.compute import count_work
from podscale.parallel.strategies import find_summation
from podscale.parallel.summation import Load

number, first, cores, strategy, width = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
shape = sys.argv[6]
group.join(first, math.prod(map(int, shape.split("x"))), number)
pod = find_pod(shape, cores=cores)
recipe = recipes.override_recipe(recipes.load_recipe("digits"), {"model.name": "resnet18", "model.width": width})
work = count_work(recipe, 10)
links = probe.measure_links(pod)
load = Load(4 * work.parameters, moments=8 * work.norm_channels)
sums = find_summation(strategy).predict_s(links, load)
message = 8 * work.norm_channels // work.norms

def time_norms(tile_summation):
    groups = norm.make_tiled_groups(pod, 1, exchanges=tile_summation == "swing_latency")

    def send_messages(x):  # in sequence, as in training; a single one would wait for the last process to start
        for _ in range(2 * work.norms):
            x = norm.sum_over_tile(x, groups) / pod.size
        return x

    return probe.time_on_mesh(pod.mesh((2, 2)), send_messages, message)[0]

norms = {name: time_norms(name) for name in ("xla", "swing_latency")}
sizes = {"message": message, "norms": work.norms}
print(json.dumps({"sums_s": sums, "norms_s": norms[sys.argv[7]], "norms_by_s": norms} | sizes))
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
    parser.add_argument("--tile-summation", default="xla", help="how batch norm sums: xla or swing_latency")
    parser.add_argument("--messages", action="store_true", help="time the messages of a step only, and do not train")
    parser.add_argument("--minutes", type=float, default=12.0, help="for each part; then it gives up")
    arguments = parser.parse_args()
    print(f"{measure_idle_share():.0%} of the cores' time is idle before the start", flush=True)
    results: dict[str, dict[str, Any]] = {}
    rows, cols = map(int, arguments.shape.split("x"))
    with Torus(rows, cols, Wires(arguments.mbit, arguments.mbit, arguments.delay_us)) as torus:
        for strategy in arguments.strategies.split(","):
            predicted = predict(torus, strategy, CORES[strategy], arguments)
            print(strategy, json.dumps(predicted), flush=True)
            if arguments.messages:
                continue
            results[strategy] = predicted | measure_training(torus, strategy, CORES[strategy], arguments)
            print(strategy, json.dumps(results[strategy]), flush=True)
    print(torus.lateness)
    if results:
        print_results(results)


def predict(torus: Torus, strategy: str, cores: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Predict the seconds of the messages of a step from timed messages."""
    port = 20000 + int(time.time()) % 20000

    def make_command(number: int, first: str) -> list[str]:
        probe_arguments = [str(number), f"{first}:{port}", str(cores), strategy, str(arguments.width), arguments.shape]
        probe_arguments.append(arguments.tile_summation)
        return [sys.executable, "-c", PROBE, *probe_arguments]

    return json.loads(torus.run(make_command, 60 * arguments.minutes, {"JAX_PLATFORMS": "cpu"})[0].splitlines()[-1])


def measure_training(torus: Torus, strategy: str, cores: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a step, without the first: the median, the shortest and the longest."""
    port = 20000 + int(time.time()) % 20000
    images = IMAGES * len(torus.hosts)
    epochs = (arguments.steps - 0.5) * images / 1437
    recipe = f"digits --model.name resnet18 --model.width {arguments.width} --batch.size {images} --batch.span 64"
    recipe += f" --train.epochs {epochs} --train.eval_epochs {epochs} --schedule.warmup_epochs 0"
    machine = f"--pod.shape {arguments.shape} --pod.cores {cores} --plan.summation {strategy} --plan.bucket_mib 0"
    machine += f" --plan.tile_summation {arguments.tile_summation}"
    machine += " --pod.heartbeat_s 900"  # sixteen processes compile on a few cores: heartbeats are late
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"

        def make_command(number: int, first: str) -> list[str]:
            group = f"--coordinator {first}:{port} --processes {len(torus.hosts)} --process {number} --run {run}"
            return [sys.executable, "-m", "podscale", "train", *f"{recipe} {machine} {group}".split()]

        torus.run(make_command, 60 * arguments.minutes, {"JAX_PLATFORMS": "cpu"})
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [images / line["images_per_s"] for line in lines if line["event"] == "train" and line["images_per_s"]]
    del times[0]
    return {"step_s": statistics.median(times), "shortest_s": min(times), "longest_s": max(times)}


def print_results(results: dict[str, dict[str, Any]]) -> None:
    """Print predictions and measurements, and by how much a step is shorter than with the first strategy."""
    messages_s = {name: result["sums_s"] + result["norms_s"] for name, result in results.items()}
    first = next(iter(results))
    for name, result in results.items():
        spread = f"{result['shortest_s']:.2f} to {result['longest_s']:.2f}"
        line = f"{name:8}messages {messages_s[name]:6.2f} s predicted, step {result['step_s']:6.2f} s ({spread})"
        if name != first:
            saved, predicted = results[first]["step_s"] - result["step_s"], messages_s[first] - messages_s[name]
            line += f", {saved:.2f} s less; predicted {predicted:.2f} s less: {saved / predicted:.2f} of it"
        print(line)


if __name__ == "__main__":
    main()
