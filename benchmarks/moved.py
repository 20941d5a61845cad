"""Claim: fused layers move fewer bytes in a training step, by default of ResNet-50.

The step is compiled for an H200 that is only described, so no GPU is needed (but JAX's CUDA plugin and nvcc from PyPI
are), as modules, with the fused layers' reference implementations, and with the Pallas kernels: `hopper` are those of
ResNets, `triton` those of Vision Transformers and ConvNeXts. Each kernel of the optimized program reads its operands
and writes its result; these bytes are added up. No time is measured.

    python benchmarks/moved.py [--images 256] [--span 64] [--ways modules,plain,hopper] [--set FIELD=VALUE ...]
    python benchmarks/moved.py --ways modules,triton --set model.name=vit_small model.stem=small optimizer.name=adamw
"""

import argparse
import re
from dataclasses import replace

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.bench.profile.program import Program
from podscale.config.options import Options
from podscale.forecast import chips
from podscale.kernels.layer_spec import HOPPER, REFERENCE, TRITON
from podscale.plan import Counts
from podscale.planner import compile
from podscale.pod import Pod

WAYS = {"modules": None, "plain": REFERENCE, "hopper": HOPPER, "triton": TRITON}
IMAGENET = Counts(1281167, 50000, 1000)
NO_KERNEL_OPCODES = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--span", type=int, default=64)
    parser.add_argument("--ways", default="modules,plain,hopper")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="other fields of the recipe")
    arguments = parser.parse_args()
    changes = {"batch.size": arguments.images, "batch.span": arguments.span, "data.lanes": 1}
    changes |= dict(text.split("=", 1) for text in arguments.set)
    recipe = recipes.override_recipe(recipes.load_recipe("resnet50-imagenet-4k"), changes)
    pod = Pod("h200", 1, 1, memory_bytes=chips.get_chip("h200").memory_bytes)
    plan = plans.make_plan(recipe, pod, IMAGENET, Options(steps_per_call=1, micro_batches=1, orthogonalize="device"))
    for way in arguments.ways.split(","):
        program = compile.compile_program(replace(plan, kernels=WAYS[way]))
        temporary = program.memory_analysis().temp_size_in_bytes
        gigabytes = count_moved_bytes(program.as_text()) / 1e9
        print(f"{way:8} {gigabytes:6.1f} GB, {temporary / 2**30:.2f} GiB temporaries", flush=True)


def count_moved_bytes(text: str) -> int:
    """Return the bytes that the kernels of a program read and write, each array once per kernel."""
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    assert entry is not None
    instructions = Program(text).computations[entry[1]]
    return sum(instruction.bytes for instruction in instructions if instruction.opcode not in NO_KERNEL_OPCODES)


if __name__ == "__main__":
    main()
