"""The sums of batch norm in modules (`parallel/batch_norm.py`), by the kernels of `reduction.py`.

A kernel reads fast what lies together in memory, 128 bytes or more, in blocks whose sides are powers of two. Where the
largest power of two in the number of channels is too small for it, several rows count as one: of 144 channels, 8 rows
are 9 blocks of 128 channels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array, Float

from podscale.kernels import elementwise, reduction
from podscale.kernels.layer_spec import Kernels, LayerSpec

Values: TypeAlias = Float[Array, "images *places channels"]
Vectors: TypeAlias = tuple[Float[Array, "groups channels"], ...]
LINE = 64  # bfloat16 numbers of a line of the GPU's cache
ROW = 128  # numbers that rows are joined to


@dataclass(frozen=True)
class KernelSums:
    """Sums over the groups of one device; see `parallel.sum_kernels.SumKernels`."""

    kernels: Kernels

    def can_sum(self, groups: int, x: Values, activation: Callable[[Array], Array] | None) -> bool:
        """Return whether the kernels can sum values like x, and the gradient through the activation."""
        if x.size // x.shape[-1] % groups or not reduction.can_use_kernel(self._make_spec(groups), _join(groups, x)):
            return False
        return activation is None or elementwise.is_differentiable(activation, x.shape[-1])

    def sum(
        self,
        groups: int,
        compute: Callable[..., tuple[Array, Array]],
        arrays: tuple[Values, ...],
        vectors: Vectors,
    ) -> Float[Array, "2 groups channels"]:
        """Return the sums over each group of both results of compute(vectors, *arrays), in float32."""
        channels = arrays[0].shape[-1]
        joined = tuple(_join(groups, array) for array in arrays)
        repeated = tuple(jnp.tile(vector, joined[0].shape[-1] // channels) for vector in vectors)

        def compute_terms(*blocks: object) -> tuple[tuple[()], tuple[Array, ...]]:
            program = elementwise.trace(compute, *blocks)
            return (), tuple(core.jaxpr_as_fun(program)(*jax.tree.leaves(blocks)))

        _, parts = reduction.map_and_sum_parts(self._make_spec(groups), compute_terms, joined, repeated, terms=2)
        return parts.reshape(2, groups, -1, channels).sum(axis=2)

    def _make_spec(self, groups: int) -> LayerSpec:
        return LayerSpec(groups, kernels=self.kernels)


def _join(groups: int, x: Values) -> Float[Array, "rows channels"]:
    """Return x as rows, several of which are one where that makes the kernels' blocks wider."""
    rows, channels = x.size // x.shape[-1], x.shape[-1]
    together = channels & -channels
    if together >= LINE or together == channels:
        return x.reshape(rows, channels)
    joined = math.gcd(ROW // together, rows // groups)
    return x.reshape(rows // joined, joined * channels)
