"""Gradient summation: the strategies by name, and sums of whole trees in buckets."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.parallel.collectives import all_reduce, along_columns, along_rows, reverse, through_all
from podscale.pod import ALL_AXES

BUCKET_BYTES = 32 * 2**20
PAYLOADS = ("float32", "bfloat16")


# --- strategies: the sum of a flat array over all devices -----------------------------------------------------------


def _xla(x: jax.Array, wire: Any) -> jax.Array:
    return lax.psum(x.astype(wire), ALL_AXES).astype(x.dtype)


def _ring(x: jax.Array, wire: Any) -> jax.Array:
    return all_reduce([(through_all,)], x, wire)


def _ring2(x: jax.Array, wire: Any) -> jax.Array:
    return all_reduce([(through_all,), (reverse(through_all),)], x, wire)


def _torus(x: jax.Array, wire: Any) -> jax.Array:
    return all_reduce([(along_rows, along_columns)], x, wire)


def _torus4(x: jax.Array, wire: Any) -> jax.Array:
    rows_first = (along_rows, along_columns), (reverse(along_rows), reverse(along_columns))
    return all_reduce([*rows_first, *(path[::-1] for path in rows_first)], x, wire)


STRATEGIES: dict[str, Callable[[jax.Array, Any], jax.Array]] = {
    "xla": _xla,
    "ring": _ring,
    "ring2": _ring2,
    "torus": _torus,
    "torus4": _torus4,
}


# --- trees -------------------------------------------------------------------------------------------------------


def sum_tree(tree: Any, *, strategy: str, payload: str = "float32", bucket_bytes: int = BUCKET_BYTES) -> Any:
    """The sum of `tree` over all devices of the pod, the same bits on each.

    Args:
        tree: arrays; floats narrower than float32 are added in float32.
        strategy: a name in `STRATEGIES`.
        payload: what travels: "float32" means the data as it is; "bfloat16" halves the bytes of floats, which the
            rings still add at full width (`xla` sums bfloat16 buffers, at whatever width the compiler adds them).
        bucket_bytes: leaves are fused into buffers of about this size, from the last leaf to the first, the order in
            which the backward pass finishes them; 0: one buffer per dtype.
    """
    if strategy not in STRATEGIES:
        raise UserError(f"there is no gradient summation {strategy!r}: {suggest_names(strategy, STRATEGIES)}")
    if payload not in PAYLOADS:
        raise UserError(f"gradients cannot travel as {payload!r}: {suggest_names(payload, PAYLOADS)}")
    if lax.axis_size(ALL_AXES) == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    for bucket in make_buckets(leaves, bucket_bytes):
        fused = jnp.concatenate([jnp.ravel(leaves[i]) for i in bucket])
        ends = list(accumulate(leaves[i].size for i in bucket))
        parts = jnp.split(_sum(fused, strategy, payload), ends[:-1])
        for i, part in zip(bucket, parts, strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)


def make_buckets(leaves: Sequence[Any], bucket_bytes: int) -> list[list[int]]:
    """Which leaves travel together: indices, last leaf first, one dtype and at most `bucket_bytes` a bucket.

    A leaf that is larger than a bucket travels alone.
    """
    limit = bucket_bytes or math.inf
    closed, filling = [], dict[Any, tuple[list[int], int]]()
    for i in reversed(range(len(leaves))):
        leaf = leaves[i]
        bucket, filled = filling.get(leaf.dtype, ([], 0))
        if bucket and filled + leaf.nbytes > limit:
            closed.append(bucket)
            bucket, filled = [], 0
        filling[leaf.dtype] = ([*bucket, i], filled + leaf.nbytes)
    return closed + [bucket for bucket, _ in filling.values()]


def _sum(x: jax.Array, strategy: str, payload: str) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return STRATEGIES[strategy](x, x.dtype)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return STRATEGIES[strategy](wide, jnp.bfloat16 if payload == "bfloat16" else wide.dtype).astype(x.dtype)
