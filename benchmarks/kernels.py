"""Claim: where the fast path takes a Pallas kernel, it is right to bfloat16's precision and faster than its plain twin.

Every 1x1 convolution of a ResNet-50 with what stands before and after it, forward and backward: the kernels' largest
error and the twin's, both against the same layer computed in float32 (as shares of the largest value), and both
times, medians of repeated calls in one run. Needs a GPU.

    python benchmarks/kernels.py [--images 256] [--size 224] [--span 64] [--repeats 20] [--check-images 64]

With --repeats 0 nothing is timed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podscale.kernels import fused
from podscale.kernels.blocking import BLOCKS, ROWS, cut
from podscale.kernels.fused import Raw
from podscale.kernels.shape import Shape

WIDTHS = (64, 128, 256, 512)  # of the four stages; the map's side is 1/4, 1/8, 1/16, 1/32 of the picture's
# What stands before a convolution: nothing, batch norm, batch norm and a shortcut, the shortcut with a batch norm too.
BARE, NORMED, ADDED, BOTH = "bare", "", "shortcut", "normed shortcut"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--span", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--check-images", type=int, default=64, help="images of the comparison with float32")
    arguments = parser.parse_args()
    print(jax.devices()[0].device_kind, f"{arguments.images} images of {arguments.size} px, span {arguments.span}")
    heads = f"{'layer':34}{'error':>9}{'twin':>9}{'forward us':>12}{'twin':>7}{'ratio':>7}"
    print(f"{heads}{'both us':>9}{'twin':>7}{'ratio':>7}")
    for stage, width in enumerate(WIDTHS):
        side = arguments.size // (4 << stage)
        if stage == 0:  # where the stem has normalized already
            measured(arguments, side, width, width, BARE)
            measured(arguments, side, width, 4 * width, BARE)
        measured(arguments, side, 4 * width, width, BOTH)
        measured(arguments, side, 4 * width, width, ADDED)
        measured(arguments, side, width, 4 * width, NORMED)


def measured(arguments: argparse.Namespace, side: int, inputs: int, outputs: int, before: str) -> None:
    name = ", ".join(filter(None, (f"{side}x{side}", f"{inputs} to {outputs}", before)))
    span = arguments.span or arguments.images
    rows, groups = arguments.images * side * side, arguments.images // span
    if not cut(rows, groups, inputs, outputs, 1 + (before in (ADDED, BOTH)), 0, 2, computed=before != BARE):
        print(f"{name:34} is left to the twin")
        return
    enough = -(-BLOCKS * ROWS // (side * side * span)) * span  # or the twin would be compared with itself
    small = drawn(max(arguments.check_images, enough), side, inputs, outputs, span, before)
    exact = both_ways("plain", *jax.tree.map(lambda v: v.astype(jnp.float32), small))
    errors = [worst(both_ways(kernels, *small), exact) for kernels in ("hopper", "plain")]
    if not arguments.repeats:
        print(f"{name:34}{errors[0]:9.4f}{errors[1]:9.4f}", flush=True)
        return
    large = drawn(arguments.images, side, inputs, outputs, span, before)
    times = []
    for function in (forward, both_ways):
        for kernels in ("hopper", "plain"):
            times.append(1e6 * timed(jax.jit(partial(function, kernels)), large, arguments.repeats))
    one, twin, both, both_twin = times
    words = f"{name:34}{errors[0]:9.4f}{errors[1]:9.4f}{one:12.0f}{twin:7.0f}{twin / one:7.2f}"
    print(f"{words}{both:9.0f}{both_twin:7.0f}{both_twin / both:7.2f}", flush=True)


def drawn(images: int, side: int, inputs: int, outputs: int, span: int, before: str) -> tuple[Any, ...]:
    """A layer's inputs and cotangents.

    What is rectified is exact in float32, in whatever order it is added up, and never zero: multiples of 1/16 by
    multiples of 1/16, and odd multiples of 1/512. Else a sum within a rounding error of zero would be above it for the
    one and below it for the other, and its gradient all or nothing.
    """
    random, groups = np.random.default_rng(0), images // span

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32), dtype)

    def sixteenths(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return (jnp.round(16 * normal(*shape, dtype=jnp.float32)) / 16).astype(dtype)

    def affine(beside: float) -> tuple[jax.Array, jax.Array]:
        factor, offset = (sixteenths(groups, inputs, dtype=jnp.float32) for _ in range(2))
        return factor, offset + beside

    picture = (images, side, side, inputs)
    cotangents = (
        normal(*picture) if before else None,  # by what the layer keeps for a shortcut
        normal(images, side, side, outputs),
        normal(2, groups, outputs, dtype=jnp.float32) / 1000,
        normal(groups, outputs, dtype=jnp.float32),
    )
    kernel = (normal(1, 1, inputs, outputs) / np.sqrt(inputs)).astype(jnp.bfloat16)
    rest = sixteenths(*picture) if before in (ADDED, BOTH) else None
    rest_affine = affine(0) if before == BOTH else ()
    return sixteenths(*picture), () if before == BARE else affine(1 / 512), rest, rest_affine, kernel, cotangents


def layer(kernels: str, keeps: bool, x: Any, affine: Any, rest: Any, rest_affine: Any, kernel: Any, groups: int) -> Any:
    def raw(values: Any, factors: Any) -> Any:
        return Raw(values, None, jnp.ones_like(factors[0])) if factors else values

    shape = Shape(groups, keeps=keeps, kernels=kernels)
    y, z = fused.layer(shape, raw(x, affine), affine, raw(rest, rest_affine), rest_affine, kernel)
    return (y if keeps else None), z.values, z.sums, z.factor


def forward(kernels: str, *given: Any) -> Any:
    *inputs, (kept, *_, factor) = given
    return layer(kernels, kept is not None, *inputs, factor.shape[0])


def both_ways(kernels: str, *given: Any) -> Any:
    *inputs, cotangents = given
    keeps, groups = cotangents[0] is not None, cotangents[-1].shape[0]
    found, pull = jax.vjp(lambda *inputs: layer(kernels, keeps, *inputs, groups), *inputs)
    return found, pull(tuple(cotangents))


def worst(found: Any, exact: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    return max(float(jnp.abs(one.astype(jnp.float32) - other).max() / jnp.abs(other).max()) for one, other in pairs)


def timed(call: Callable[..., Any], inputs: tuple[Any, ...], repeats: int) -> float:
    """Seconds of a call among several that follow each other without a pause."""
    jax.block_until_ready(call(*inputs))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(repeats):
            result = call(*inputs)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / repeats)
    return statistics.median(times)


if __name__ == "__main__":
    main()
