"""Claim: a Vision Transformer's Pallas kernels are right to bfloat16's precision, and as fast as memory allows.

Layer norm with the sum before it, GELU with its bias, and cuDNN's attention, forward and backward, of a batch of
tokens: errors of the kernels and of the reference in bfloat16, both against the reference in float32 (‖a - b‖ / ‖b‖,
the worst of the results), times of both, and bytes a second of the kernels, with each array read and written once.
Needs a GPU.

    python benchmarks/transformer_kernels.py [--images 256] [--tokens 197] [--widths 384 768] [--repeats 20]
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernels import time_calls

from podscale.kernels.gelu import add_bias_and_gelu
from podscale.kernels.layer_norm import add_and_normalize
from podscale.kernels.layer_spec import REFERENCE, TRITON, Kernels
from podscale.models.vit import attend, attend_fused

HEAD = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=197)
    parser.add_argument("--widths", type=int, nargs="+", default=[384, 768])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, {arguments.images} images of {arguments.tokens} tokens")
    columns = f"{'kernel':34}{'error':>9}{'ref.':>9}{'forward us':>12}{'ref.':>7}{'both us':>9}{'ref.':>7}"
    print(f"{columns}{'GB/s':>8}")
    for width in arguments.widths:
        shape, repeats = (arguments.images, arguments.tokens), arguments.repeats
        measure(f"sum and layer norm, {width}", normalize, sample((*shape, width), 2, 3), 8, repeats)
        measure(f"bias and GELU, {4 * width}", add_bias_and_gelu, sample((*shape, 4 * width), 1, 1), 5, repeats)
        heads = (arguments.images, 200, width // HEAD, HEAD)
        measure(f"attention, {width // HEAD} heads", attend_to, sample(heads, 3, 0), 12, repeats)


def normalize(kernels: Kernels, x: Any, y: Any, bias: Any, scale: Any, shift: Any) -> Any:
    return add_and_normalize(kernels, x, y, bias, (1 + scale, shift), 1e-6)


def attend_to(kernels: Kernels, q: Any, k: Any, v: Any) -> Any:
    """Return the attention of 200 tokens, of which the last three are padding."""
    return attend_fused(q, k, v, 3) if kernels == TRITON else attend(q, k[:, :-3], v[:, :-3])


def sample(shape: tuple[int, ...], arrays: int, vectors: int) -> list[jax.Array]:
    """Return random arrays of bfloat16, and vectors of float32 for their last axis."""
    random = np.random.default_rng(0)
    large = [jnp.asarray(random.standard_normal(shape, np.float32), jnp.bfloat16) for _ in range(arrays)]
    return large + [jnp.asarray(random.standard_normal(shape[-1], np.float32)) / 4 for _ in range(vectors)]


def measure(name: str, function: Callable[..., Any], inputs: list[Any], passes: int, repeats: int) -> None:
    """Print the errors and times of a function; `passes` arrays like its input are read and written both ways."""

    outputs = jax.eval_shape(partial(function, TRITON), *inputs)
    cotangents = jax.tree.map(lambda v: jnp.asarray(np.random.default_rng(1).normal(size=v.shape), v.dtype), outputs)

    def pull_back(kernels: Kernels, cotangents: Any, *inputs: Any) -> Any:
        outputs, pull = jax.vjp(partial(function, kernels), *inputs)
        return outputs, pull(cotangents)

    arrays = [cotangents, *inputs]
    exact = jax.jit(partial(pull_back, REFERENCE))(*jax.tree.map(lambda v: v.astype(jnp.float32), arrays))
    errors = [compute_error(jax.jit(partial(pull_back, kernels))(*arrays), exact) for kernels in (TRITON, REFERENCE)]
    forward, both = (
        [1e6 * time_calls(jax.jit(partial(call, k)), arguments, repeats) for k in (TRITON, REFERENCE)]
        for call, arguments in ((function, inputs), (pull_back, arrays))
    )
    rate = passes * inputs[0].nbytes / both[0] / 1e3
    line = f"{name:34}{errors[0]:9.4f}{errors[1]:9.4f}{forward[0]:12.0f}{forward[1]:7.0f}"
    print(f"{line}{both[0]:9.0f}{both[1]:7.0f}{rate:8.0f}", flush=True)


def compute_error(arrays: Any, exact: Any) -> float:
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(exact), strict=True)
    return max(float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)) for a, b in pairs)


if __name__ == "__main__":
    main()
