"""Claim: as a matrix product, a 1x1 convolution is as fast as by cuDNN, and compiles in a fraction of the time.

Both are compiled by XLA with the options of a training step: forward, by the input, and by the weights. Printed are the
microseconds of their kernels, by the profiler, and the seconds of compiling the three. Needs a GPU.

    python benchmarks/products.py [256x28x128x512 64x8x1024x256 ...]      (images x side x inputs x outputs)
"""

import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from podscale.bench.profile import trace
from podscale.bench.step import NAMED_KERNELS
from podscale.kernels.reference import multiply_pixels

DEFAULT = (
    "256x28x128x512 256x28x512x128 256x14x256x1024 256x14x1024x256 256x7x512x2048 256x7x2048x512 "
    "64x32x64x256 64x16x512x128 64x8x1024x256 64x4x512x2048"
)
OPTIONS = {"xla_gpu_autotune_level": "2", "xla_gpu_enable_triton_gemm": False, **NAMED_KERNELS}
CALLS = 10


def main() -> None:
    if jax.default_backend() != "gpu":
        sys.exit("there is no GPU here")
    print(
        f"{jax.devices()[0].device_kind}; microseconds forward, by the input, by the weights; seconds to compile them"
    )
    for text in sys.argv[1:] or DEFAULT.split():
        images, side, inputs, outputs = map(int, text.split("x"))
        arrays = sample(images, side, inputs, outputs)
        cells = [f"{name} {format_times(*measure(way, arrays))}" for name, way in WAYS.items()]
        print(f"{text:16}  " + "   ".join(cells), flush=True)


def convolve(x: Array, kernel: Array) -> Array:
    """Return the convolution by XLA, which takes cuDNN's."""
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


WAYS = {"cuDNN": convolve, "cuBLAS": multiply_pixels}


def sample(images: int, side: int, inputs: int, outputs: int) -> tuple[Array, Array, Array]:
    """Return random images, kernel, and gradient by the result."""
    shapes = (images, side, side, inputs), (1, 1, inputs, outputs), (images, side, side, outputs)
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel, gradient = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    return x, kernel, gradient


def measure(way: Callable[[Array, Array], Array], arrays: tuple[Array, Array, Array]) -> tuple[list[float], float]:
    """Return the microseconds of each of the three programs, and the seconds of compiling them."""
    programs = [
        jax.jit(lambda x, kernel, gradient: way(x, kernel)),
        jax.jit(lambda x, kernel, gradient: jax.vjp(way, x, kernel)[1](gradient)[0]),
        # As the optimizer reads it: in float32, with outputs first.
        jax.jit(lambda x, k, gradient: jax.vjp(way, x, k)[1](gradient)[1].transpose(3, 0, 1, 2).astype(jnp.float32)),
    ]
    lowered = [program.lower(*arrays) for program in programs]
    start = time.perf_counter()
    compiled = [program.compile(OPTIONS) for program in lowered]
    seconds = time.perf_counter() - start
    return [1e6 * time_kernels(program, arrays) for program in compiled], seconds


def time_kernels(program: jax.stages.Compiled, arrays: tuple[Array, ...]) -> float:
    """Return the seconds of a program's kernels."""
    jax.block_until_ready(program(*arrays))
    activity = trace.profile_device(lambda: [program(*arrays) for _ in range(CALLS)], jax.devices()[0])
    return sum(activity.seconds.values()) / CALLS


def format_times(microseconds: list[float], seconds: float) -> str:
    return " ".join(f"{value:6.1f}" for value in microseconds) + f" ({seconds:.1f} s)"


if __name__ == "__main__":
    main()
