"""Measures where the time before the first step goes, for the steps of several networks on one GPU.

Each case is a process of its own without any cache of compiled programs: everything is traced, lowered and tuned again.
Printed are the seconds of importing and building the network, of tracing and lowering the step, and of compiling it,
and milliseconds per step, the median of five measurements. It claims nothing, and so runs no peer.

    python benchmarks/compile_time.py [resnet50 deterministic vit_small efficientnet_b0 imagefolder]
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

ADAMW = MappingProxyType(
    {
        "model.stem": "small",
        "optimizer.name": "adamw",
        "optimizer.weight_decay": 0.05,
        "optimizer.second_moment": 0.999,
        "schedule.peak": 1e-3,
    }
)
WOOF = MappingProxyType({"data.classes": 10, "data.train_samples": 9025, "data.val_samples": 3929})


class Case(NamedTuple):
    """A training step: recipe, images per device, fields of the recipe and options."""

    recipe: str = "resnet50-imagenet-4k"
    images: int = 256
    fields: Mapping[str, Any] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})


CASES = MappingProxyType(
    {
        "resnet50": Case(),
        "deterministic": Case(options={"deterministic": True}),
        "vit_small": Case(fields={"model.name": "vit_small", **ADAMW}),
        "efficientnet_b0": Case(fields={"model.name": "efficientnet_b0", "batch.span": 256, **ADAMW}),
        "imagefolder": Case("imagefolder", 64, WOOF),
    }
)


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    if names[0] == "--case":
        print(json.dumps(measure(CASES[names[1]])))
        return
    if unknown := set(names) - set(CASES):
        sys.exit(f"there is no case {', '.join(sorted(unknown))}: {', '.join(CASES)}")
    print(f"{'case':<16}  {'start s':>7}  {'lower s':>7}  {'compile s':>9}  {'ms per step':>11}  {'images/s':>8}")
    for name in names:
        with tempfile.TemporaryDirectory() as cache:  # empty, and so is XLA's record of what it has tried
            environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
            command = [sys.executable, __file__, "--case", name]
            process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        times = json.loads(process.stdout.splitlines()[-1])
        print(
            f"{name:<16}  {times['start']:7.1f}  {times['lower']:7.1f}  {times['compile']:9.1f}  "
            f"{times['ms']:11.2f}  {times['images_per_s']:8,.0f}",
            flush=True,
        )


def measure(case: Case) -> dict[str, float]:
    """Return seconds of starting, lowering and compiling, and milliseconds per step."""
    clock = [time.perf_counter()]
    import jax

    from podscale import find_pod
    from podscale.bench import step as bench
    from podscale.config.options import Options
    from podscale.recipe import load_recipe
    from podscale.training import compilation, step
    from podscale.training.advance_compilation import compile_in_advance
    from podscale.training.program_cache import enable_program_cache
    from podscale.training.update_rule import place_scalars

    enable_program_cache()
    recipe, options = load_recipe(case.recipe).override(case.fields), replace(Options(), **case.options)
    program = bench._make_program(recipe, find_pod(), options, case.images, repeats=1)
    state, batch, plan = program.init_state(), bench._make_batch(program), program.plan
    jax.block_until_ready((state, batch))
    clock.append(time.perf_counter())
    scalars = place_scalars(plan, program.mesh)
    arguments = step.describe_call_arguments(plan, program.mesh, plan.recipe.data.image_size)[:3]
    with compile_in_advance(plan, compilation.choose_compiler_options(plan)) as advance:  # as `compile_train_step`
        traced = compilation.make_train_call(program).trace(program.describe_state(), *arguments, scalars)
        advance.tune_convolutions(traced)
        lowered = traced.lower()
        advance.stop_tuning()
        advance.compile_kernels([lowered])
        clock.append(time.perf_counter())
        call = compilation.compile_program(lowered, plan, None)
    if advance.errors:
        raise advance.errors[0]
    clock.append(time.perf_counter())
    state, _ = call(state, *batch, scalars)
    jax.block_until_ready(state)
    times = []
    for _ in range(5):
        start, calls = time.perf_counter(), max(2, 24 // plan.steps_per_call)
        for _ in range(calls):
            state, _ = call(state, *batch, scalars)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / (calls * plan.steps_per_call))
    seconds = statistics.median(times)
    parts = [end - start for start, end in itertools.pairwise(clock)]
    return {
        **dict(zip(("start", "lower", "compile"), parts, strict=True)),
        "ms": 1e3 * seconds,
        "images_per_s": case.images / seconds,
    }


if __name__ == "__main__":
    main()
