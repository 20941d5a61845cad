"""Claim: where the fast path takes a Pallas kernel, it is right to bfloat16's precision and faster than its plain twin.

Every 1x1 convolution of a ResNet-50 with what stands before and after it, forward and backward: the kernels' largest
error and the twin's, both against the same layer computed in float32 (as shares of the largest value), and both
times, medians of repeated calls in one run. Needs a GPU.

    python benchmarks/kernels.py [--images 256] [--size 224] [--span 64] [--repeats 20] [--check-images 64]
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
from podscale.kernels.cut import cut
from podscale.kernels.fused import Raw
from podscale.kernels.shape import Shape

WIDTHS = (64, 128, 256, 512)  # of the four stages; the map's side is 1/4, 1/8, 1/16, 1/32 of the picture's


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
        measured(arguments, f"{side}x{side}, {4 * width} to {width}, shortcut", side, 4 * width, width, True)
        measured(arguments, f"{side}x{side}, {width} to {4 * width}", side, width, 4 * width, False)


def measured(arguments: argparse.Namespace, name: str, side: int, inputs: int, outputs: int, shortcut: bool) -> None:
    span = arguments.span or arguments.images
    rows, groups = arguments.images * side * side, arguments.images // span
    if not cut(rows, groups, inputs, outputs, 1 + shortcut, 0, 2, computed=True):
        print(f"{name:34} is left to the twin")
        return
    small = drawn(max(arguments.check_images, span), side, inputs, outputs, span, shortcut)
    exact = both_ways("plain", *jax.tree.map(lambda v: v.astype(jnp.float32), small))
    errors = [worst(both_ways(kernels, *small), exact) for kernels in ("hopper", "plain")]
    large = drawn(arguments.images, side, inputs, outputs, span, shortcut)
    times = []
    for function in (forward, both_ways):
        for kernels in ("hopper", "plain"):
            times.append(1e6 * timed(jax.jit(partial(function, kernels)), large, arguments.repeats))
    one, twin, both, both_twin = times
    words = f"{name:34}{errors[0]:9.4f}{errors[1]:9.4f}{one:12.0f}{twin:7.0f}{twin / one:7.2f}"
    print(f"{words}{both:9.0f}{both_twin:7.0f}{both_twin / both:7.2f}", flush=True)


def drawn(images: int, side: int, inputs: int, outputs: int, span: int, shortcut: bool) -> tuple[Any, ...]:
    random, groups = np.random.default_rng(0), images // span

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32), dtype)

    picture = (images, side, side, inputs)
    affine = (normal(groups, inputs, dtype=jnp.float32), normal(groups, inputs, dtype=jnp.float32))
    cotangents = (
        normal(images, side, side, outputs),
        normal(2, groups, outputs, dtype=jnp.float32) / 1000,
        normal(groups, outputs, dtype=jnp.float32),
    )
    kernel = normal(1, 1, inputs, outputs) / np.sqrt(inputs)
    rest = (normal(*picture), normal(*picture)) if shortcut else None  # what is added, and the gradient by the sum
    return normal(*picture), affine, rest, kernel.astype(jnp.bfloat16), cotangents


def layer(kernels: str, shortcut: bool, x: Any, affine: Any, rest: Any, kernel: Any) -> Any:
    groups = affine[0].shape[0]
    shape = Shape(groups, keeps=shortcut, kernels=kernels)
    y, raw = fused.layer(shape, Raw(x, None, jnp.ones_like(affine[0])), affine, rest, (), kernel)
    return (y if shortcut else None), raw.values, raw.sums, raw.factor


def forward(kernels: str, x: Any, affine: Any, rest: Any, kernel: Any, cotangents: Any) -> Any:
    return layer(kernels, rest is not None, x, affine, rest and rest[0], kernel)


def both_ways(kernels: str, x: Any, affine: Any, rest: Any, kernel: Any, cotangents: Any) -> Any:
    shortcut = rest is not None
    found, pull = jax.vjp(partial(layer, kernels, shortcut), x, affine, rest and rest[0], kernel)
    return found, pull((rest and rest[1], *cotangents))


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
