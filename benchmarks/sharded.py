"""Claim: a step with `sharded` updates takes no longer than one with `torus` sums, on four processes.

ResNet-18 at 32 px, few images, so that sums and updates weigh much. Four processes on this machine train on made-up
data (`podscale bench step`), by turns with the one and with the other; the median of the ratios is what counts.

    python benchmarks/sharded.py [--images 4] [--rounds 3] [--optimizer lars]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys

SETTINGS = "digits --model.name resnet18 --data.image_size 32 --pod.shape 2x2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4, help="a process")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--optimizer", default="lars")
    arguments = parser.parse_args()
    ratios = []
    for _ in range(arguments.rounds):
        ours, peer = (step_ms(name, arguments) for name in ("sharded", "torus"))
        ratios.append(ours / peer)
        print(f"sharded {ours:.0f} ms, torus {peer:.0f} ms a step: {ours / peer:.2f}", flush=True)
    print(f"median of the ratios, sharded / torus: {statistics.median(ratios):.2f}")


def step_ms(summation: str, arguments: argparse.Namespace) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    what = f"{SETTINGS} --model.width {arguments.width} --images {arguments.images} --repeats 3 --json"
    what += f" --optimizer.name {arguments.optimizer} --plan.summation {summation}"
    joins = f"--coordinator 127.0.0.1:{port} --processes 4"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "podscale", "bench", "step", *f"{what} {joins} --process {number}".split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            text=True,
        )
        for number in range(4)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in started]
    return json.loads(outputs[0])["step_ms"]


if __name__ == "__main__":
    main()
