"""Claim: on a torus limited by its links, `torus` beats a ring at small payloads and `torus4` at large ones.

Every strategy of gradient summation runs as rows x columns separate processes over a network of namespaces on this
machine (`network.py`), and Gloo's own all-reduce, which `xla` uses between CPUs. There, several messages of one
program are sent in sequence, so a process has one device for each path: two for `ring2`, four for `torus4`, or as many
as NAME/DEVICES says (`--strategies swing,swing/4`). `auto` is the choice by size among all strategies on that pod.
A second table has the ratios. Needs root.

    python benchmarks/torusnet/sums.py 4x4 [--mbit 25] [--inside-mbit M] [--delay-us 2000] [--bytes 64,65536,...]

With --inside-mbit the hosts of a row are a node: fast links inside, --mbit between, as in a cluster of GPU machines.
The result goes to --json, from which `draw.py` makes tables and plots.
"""

import argparse
import json
import os
import socket
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from network import Torus, Wires, measure_idle_share

CORES = {"xla": 1, "ring": 1, "torus": 1, "swing": 1, "swing_latency": 1, "auto": 1, "ring2": 2, "torus4": 4}
SIZES = "64,4096,65536,1000000,10000000"
RATIOS = (("torus", "ring"), ("swing_latency", "torus"), ("auto", "xla"), ("torus4", "xla"), ("torus4", "ring2"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", metavar="RxC")
    parser.add_argument("--mbit", type=float, default=25.0)
    parser.add_argument("--inside-mbit", type=float, default=0.0)
    parser.add_argument("--delay-us", type=float, default=2000.0)
    parser.add_argument("--bytes", default=SIZES)
    parser.add_argument("--strategies", default=",".join(CORES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=15.0, help="for each group of strategies; then it gives up")
    parser.add_argument("--json", type=Path, default=Path("sums.json"))
    arguments = parser.parse_args()
    rows, cols = map(int, arguments.shape.split("x"))
    wires = Wires(arguments.inside_mbit or arguments.mbit, arguments.mbit, arguments.delay_us)
    print(f"{measure_idle_share():.0%} of the cores' time is idle before the start", flush=True)
    points: list[dict[str, Any]] = []
    links: dict[str, Any] = {}
    chosen = [parse_strategy(text) for text in arguments.strategies.split(",")]
    for cores in sorted({cores for _, cores in chosen}):
        names = [name for name, count in chosen if count == cores]
        with Torus(rows, cols, wires) as torus:
            measurement = measure_sums(torus, cores, names, arguments)
        links[str(cores)] = measurement["links"] | {"auto": measurement["auto"]}
        points += [point | {"cores": cores} for point in measurement["points"]]
        print(f"{', '.join(names)}: {torus.lateness}; auto: {measurement['auto']}", flush=True)
    result = vars(arguments) | {"json": "", "cpus": os.cpu_count(), "date": str(date.today())}
    arguments.json.write_text(json.dumps(result | {"links": links, "points": points}, indent=1) + "\n")
    print_points(points)


def parse_strategy(text: str) -> tuple[str, int]:
    """Return a strategy, and the devices of a process: NAME, with one for each of its paths, or NAME/DEVICES."""
    name, _, cores = text.partition("/")
    return name, int(cores) if cores else CORES[name]


def measure_sums(torus: Torus, cores: int, names: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run `podscale bench sum` on every host of the torus and return its result."""
    port = 20000 + int(time.time()) % 20000

    def make_command(number: int, first: str) -> list[str]:
        group = ["--coordinator", f"{first}:{port}", "--processes", str(len(torus.hosts)), "--process", str(number)]
        sums = ["--strategies", ",".join(names), "--bytes", arguments.bytes, "--no-tree"]
        machine = ["--pod.shape", arguments.shape, "--pod.cores", str(cores), "--plan.bucket_mib", "0"]
        output = ["--repeats", str(arguments.repeats), "--json"]
        return [sys.executable, "-m", "podscale", "bench", "sum", *sums, *machine, *output, *group]

    env = {"JAX_PLATFORMS": "cpu", "GLOO_SOCKET_IFNAME": "", "HOSTNAME": socket.gethostname()}
    return json.loads(torus.run(make_command, 60 * arguments.minutes, env)[0])


def print_points(points: list[dict[str, Any]]) -> None:
    """Print the points with their predictions, then the ratios."""
    for point in points:
        model = f"model {point['model_ms']:8.1f} ({point['ms'] / point['model_ms'] - 1:+.0%})"
        print(f"{point['strategy']:14}{point['cores']:2}{point['payload']:>16}{point['ms']:10.1f} ms, {model}")
    times = {(point["strategy"], point["payload"]): point["ms"] for point in points}
    for faster, slower in RATIOS:
        for payload in dict.fromkeys(point["payload"] for point in points):
            if (faster, payload) in times and (slower, payload) in times:
                print(f"{slower} / {faster} at {payload}: {times[slower, payload] / times[faster, payload]:.2f}")


if __name__ == "__main__":
    main()
