"""Claim: over up to 200 tokens, our attention kernels are twice as fast as cuDNN's, and as exact.

Results and gradients of both are compared with those in float32 (‖a - b‖ / ‖b‖); then both are timed on the same arrays
in the same run, forward, and forward and backward: the slope between 20 and 120 calls, the median of several. cuDNN's
kernels are called as JAX calls them. Needs a Hopper GPU.

    python benchmarks/attention.py [--images 256] [--tokens 200] [--padding 3] [--heads 6] [--repeats 5]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from podscale.kernels import attention
from podscale.kernels.attention_limits import DEPTH
from podscale.models.vit import attend_fused

FEW, MANY = 20, 120
Attend = Callable[..., Array]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--padding", type=int, default=3, help="tokens at the end that no token attends to")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check-images", type=int, default=32, help="images of the comparison with float32")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("there is no GPU here")
    shape, padding = (arguments.tokens, arguments.heads, DEPTH), arguments.padding
    print(
        f"{jax.devices()[0].device_kind}, {arguments.images} images of {arguments.tokens} tokens, {padding} of padding"
    )
    ways = {
        "podscale": partial(attention.attend, padding=padding),
        "cuDNN": lambda q, k, v: attend_fused(q, k, v, padding),
    }
    exact = partial(attention.reference, padding=padding)
    few, all_ = sample((arguments.check_images, *shape)), sample((arguments.images, *shape))
    seconds = {}
    print(f"{'':10}{'out':>9}{'by q':>9}{'by k':>9}{'by v':>9}{'forward us':>12}{'both us':>9}")
    for name, attend in ways.items():
        errors = compute_errors(attend, exact, few)
        seconds[name] = [
            measure(function, arrays, arguments.repeats)
            for function, arrays in ((attend, all_[:3]), (partial(differentiate, attend), all_))
        ]
        times = "".join(f"{1e6 * value:>{width}.1f}" for value, width in zip(seconds[name], (12, 9), strict=True))
        print(f"{name:10}" + "".join(f"{error:9.5f}" for error in errors) + times, flush=True)
    ratios = [theirs / ours for ours, theirs in zip(seconds["podscale"], seconds["cuDNN"], strict=True)]
    print(f"ratio: {ratios[0]:.2f} forward, {ratios[1]:.2f} both ways")


def sample(shape: tuple[int, ...]) -> list[Array]:
    """Return random queries, keys, values, and gradients by the result."""
    keys = jax.random.split(jax.random.key(1), 4)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]


def differentiate(attend: Attend, q: Array, k: Array, v: Array, gradient: Array) -> tuple[Array, ...]:
    """Return the result, and the gradients by queries, keys and values."""
    result, pull = jax.vjp(attend, q, k, v)
    return result, *pull(gradient)


def compute_errors(attend: Attend, exact: Attend, arrays: list[Array]) -> list[float]:
    """Return the errors of the result and of the gradients."""
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(partial(differentiate, exact))(*(array.astype(jnp.float32) for array in arrays))
    results = jax.jit(partial(differentiate, attend))(*arrays)
    pairs = zip(results, expected, strict=True)
    return [float(np.linalg.norm(a.astype(jnp.float32) - b) / np.linalg.norm(b)) for a, b in pairs]


def measure(function: Callable[..., object], arrays: list[Array], repeats: int) -> float:
    """Return the median of the seconds of a call."""
    call = jax.jit(function)
    jax.block_until_ready(call(*arrays))

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = call(*arrays)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    run(FEW)
    return statistics.median((run(MANY) - run(FEW)) / (MANY - FEW) for _ in range(repeats))


if __name__ == "__main__":
    main()
