"""Claim: a step with `sharded` updates takes no longer than one with `torus` sums, on four processes.

ResNet-18 at 32 px with few images, so that sums and updates take much of the step. Four processes on this machine train
on made-up data (`podscale bench step`), alternately with `sharded` and with `torus`; the median of the ratios counts.

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
    parser.add_argument("--images", type=int, default=4, help="per process")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--optimizer", default="lars")
    arguments = parser.parse_args()
    ratios = []
    for _ in range(arguments.rounds):
        sharded, torus = (measure_step_ms(name, arguments) for name in ("sharded", "torus"))
        ratios.append(sharded / torus)
        print(f"sharded {sharded:.0f} ms, torus {torus:.0f} ms a step: {sharded / torus:.2f}", flush=True)
    print(f"median of the ratios, sharded / torus: {statistics.median(ratios):.2f}")


def measure_step_ms(summation: str, arguments: argparse.Namespace) -> float:
    """Return the milliseconds of a step on four processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = f"{SETTINGS} --model.width {arguments.width} --images {arguments.images} --repeats 3 --json"
    settings += f" --optimizer.name {arguments.optimizer} --plan.summation {summation}"
    group = f"--coordinator 127.0.0.1:{port} --processes 4"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "podscale", "bench", "step", *f"{settings} {group} --process {number}".split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            text=True,
        )
        for number in range(4)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    return json.loads(outputs[0])["step_ms"]


if __name__ == "__main__":
    main()
