"""Claim: fused layers move fewer bytes in a training step of ResNet-50.

The step is compiled for one described H200, without one (JAX's CUDA plugin and nvcc from PyPI must be there), as
modules, as a chain of plain twins, and with the Pallas kernels. Each kernel of the optimized program reads its operands
and writes its result; that is added up. No time is measured.

    python benchmarks/moved.py [--images 256] [--span 64] [--ways modules,plain,hopper]
"""

import argparse
import re
from dataclasses import replace

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.bench.profile.program import Program
from podscale.config.options import Options
from podscale.forecast import chips
from podscale.plan import Counts
from podscale.planner import compile, described_devices
from podscale.pod import Pod

IMAGENET = Counts(1281167, 50000, 1000)
NO_KERNELS = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--span", type=int, default=64)
    parser.add_argument("--ways", default="modules,plain,hopper")
    arguments = parser.parse_args()
    changes = {"batch.size": arguments.images, "batch.span": arguments.span, "data.lanes": 1}
    recipe = recipes.override(recipes.load("resnet50-imagenet-4k"), changes)
    where = Pod("h200", 1, 1, memory_bytes=chips.chip("h200").memory_bytes)
    plan = plans.make_plan(recipe, where, IMAGENET, Options(steps_per_call=1, micro_batches=1))
    for way in arguments.ways.split(","):
        here = replace(plan, kernels="" if way == "modules" else way, pod=described_devices.pod(where))
        program = compile._compiled(here)
        temporary = program.memory_analysis().temp_size_in_bytes
        print(f"{way:8} {moved(program.as_text()) / 1e9:6.1f} GB, {temporary / 2**30:.2f} GiB temporaries", flush=True)


def moved(text: str) -> int:
    """Bytes that the kernels of a program read and write, each array once for each kernel."""
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    assert entry is not None
    instructions = Program(text).computations[entry[1]]
    return sum(one.bytes for one in instructions if one.opcode not in NO_KERNELS)


if __name__ == "__main__":
    main()
