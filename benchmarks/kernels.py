"""Claim: Pallas kernels are right to bfloat16's precision and faster than the reference implementation.

Every 1x1 convolution of a ResNet-50 with the operations before and after it, forward and backward: the largest error of
the kernels and of the reference, both against the same layer computed in float32 (as fractions of the largest value),
and both times, medians of repeated calls in one run. Needs a GPU.

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
from podscale.kernels.blocking import BLOCKS, ROWS, Product, choose_blocking
from podscale.kernels.fused import RawOutput
from podscale.kernels.layer_spec import HOPPER, REFERENCE, Kernels, LayerSpec

WIDTHS = (64, 128, 256, 512)  # of the four stages; the map's side is 1/4, 1/8, 1/16, 1/32 of the image's
# What precedes a convolution: nothing, batch norm, batch norm and a shortcut, a shortcut with its own batch norm.
BARE, NORMALIZED, SHORTCUT, NORMALIZED_SHORTCUT = "bare", "", "shortcut", "normed shortcut"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--span", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--check-images", type=int, default=64, help="images of the comparison with float32")
    arguments = parser.parse_args()
    print(jax.devices()[0].device_kind, f"{arguments.images} images of {arguments.size} px, span {arguments.span}")
    columns = f"{'layer':34}{'error':>9}{'ref.':>9}{'forward us':>12}{'ref.':>7}{'ratio':>7}"
    print(f"{columns}{'both us':>9}{'ref.':>7}{'ratio':>7}")
    for stage, width in enumerate(WIDTHS):
        side = arguments.size // (4 << stage)
        if stage == 0:  # the stem has already normalized
            measure_layer(arguments, side, width, width, BARE)
            measure_layer(arguments, side, width, 4 * width, BARE)
        measure_layer(arguments, side, 4 * width, width, NORMALIZED_SHORTCUT)
        measure_layer(arguments, side, 4 * width, width, SHORTCUT)
        measure_layer(arguments, side, width, 4 * width, NORMALIZED)


def measure_layer(arguments: argparse.Namespace, side: int, inputs: int, outputs: int, before: str) -> None:
    """Print the errors and times of one layer."""
    name = ", ".join(filter(None, (f"{side}x{side}", f"{inputs} to {outputs}", before)))
    span = arguments.span or arguments.images
    rows, groups = arguments.images * side * side, arguments.images // span
    left_arrays = 1 + (before in (SHORTCUT, NORMALIZED_SHORTCUT))
    if not choose_blocking(Product(rows, groups, inputs, outputs, left_arrays, 0, 2, computes_left=before != BARE)):
        print(f"{name:34} is left to the reference")
        return
    minimum = -(-BLOCKS * ROWS // (side * side * span)) * span  # or the reference would be compared with itself
    small = sample_layer(max(arguments.check_images, minimum), side, inputs, outputs, span, before)
    exact = run_both_ways(REFERENCE, *jax.tree.map(lambda v: v.astype(jnp.float32), small))
    errors = [compute_error(run_both_ways(kernels, *small), exact) for kernels in (HOPPER, REFERENCE)]
    if not arguments.repeats:
        print(f"{name:34}{errors[0]:9.4f}{errors[1]:9.4f}", flush=True)
        return
    large = sample_layer(arguments.images, side, inputs, outputs, span, before)
    times = []
    for function in (run_forward, run_both_ways):
        for kernels in (HOPPER, REFERENCE):
            times.append(1e6 * time_calls(jax.jit(partial(function, kernels)), large, arguments.repeats))
    forward, forward_reference, both, both_reference = times
    line = f"{name:34}{errors[0]:9.4f}{errors[1]:9.4f}"
    line += f"{forward:12.0f}{forward_reference:7.0f}{forward_reference / forward:7.2f}"
    print(f"{line}{both:9.0f}{both_reference:7.0f}{both_reference / both:7.2f}", flush=True)


def sample_layer(images: int, side: int, inputs: int, outputs: int, span: int, before: str) -> tuple[Any, ...]:
    """Return random inputs and cotangents of a layer.

    What is rectified is exact in float32, in whatever order it is added up, and never zero: multiples of 1/16 by
    multiples of 1/16, and odd multiples of 1/512. Otherwise a sum within a rounding error of zero could be above zero
    for one implementation and below it for the other, and its gradient all or nothing.
    """
    random, groups = np.random.default_rng(0), images // span

    def sample_normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32), dtype)

    def sample_sixteenths(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return (jnp.round(16 * sample_normal(*shape, dtype=jnp.float32)) / 16).astype(dtype)

    def sample_affine(shift: float) -> tuple[jax.Array, jax.Array]:
        factor, offset = (sample_sixteenths(groups, inputs, dtype=jnp.float32) for _ in range(2))
        return factor, offset + shift

    image_shape = (images, side, side, inputs)
    cotangents = (
        sample_normal(*image_shape) if before else None,  # by the input that the layer keeps for a shortcut
        sample_normal(images, side, side, outputs),
        sample_normal(2, groups, outputs, dtype=jnp.float32) / 1000,
        sample_normal(groups, outputs, dtype=jnp.float32),
    )
    kernel = (sample_normal(1, 1, inputs, outputs) / np.sqrt(inputs)).astype(jnp.bfloat16)
    shortcut = sample_sixteenths(*image_shape) if before in (SHORTCUT, NORMALIZED_SHORTCUT) else None
    shortcut_affine = sample_affine(0) if before == NORMALIZED_SHORTCUT else ()
    return (
        sample_sixteenths(*image_shape),
        () if before == BARE else sample_affine(1 / 512),
        shortcut,
        shortcut_affine,
        kernel,
        cotangents,
    )


def apply_layer(
    kernels: Kernels,
    keep_input: bool,
    x: Any,
    affine: Any,
    shortcut: Any,
    shortcut_affine: Any,
    kernel: Any,
    groups: int,
) -> Any:
    """Return all outputs of a fused layer."""

    def make_raw(values: Any, factors: Any) -> Any:
        return RawOutput(values, None, jnp.ones_like(factors[0])) if factors else values

    spec = LayerSpec(groups, keep_input=keep_input, kernels=kernels)
    raw_shortcut = make_raw(shortcut, shortcut_affine)
    y, z = fused.apply_layer(spec, make_raw(x, affine), affine, raw_shortcut, shortcut_affine, kernel)
    assert z.sums is not None
    return (y if keep_input else None), z.values, jnp.stack(z.sums), z.factor


def run_forward(kernels: Kernels, *arguments: Any) -> Any:
    """Return the outputs of a layer; `arguments` are those of `sample_layer`."""
    *inputs, (dy, *_, factor) = arguments
    return apply_layer(kernels, dy is not None, *inputs, factor.shape[0])


def run_both_ways(kernels: Kernels, *arguments: Any) -> Any:
    """Return the outputs and the gradients of a layer; `arguments` are those of `sample_layer`."""
    *inputs, cotangents = arguments
    keep_input, groups = cotangents[0] is not None, cotangents[-1].shape[0]
    outputs, pull = jax.vjp(lambda *inputs: apply_layer(kernels, keep_input, *inputs, groups), *inputs)
    return outputs, pull(tuple(cotangents))


def compute_error(arrays: Any, exact: Any) -> float:
    """Return the largest difference of any array, as a fraction of that array's largest value."""
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(exact), strict=True)
    return max(float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max()) for a, b in pairs)


def time_calls(call: Callable[..., Any], inputs: tuple[Any, ...], repeats: int) -> float:
    """Return seconds per call, of several calls without a pause between them."""
    jax.block_until_ready(call(*inputs))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            result = call(*inputs)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


if __name__ == "__main__":
    main()
