"""Gradient summation: strategies by name, and sums of whole trees in buckets.

Every strategy but `xla` is an all-reduce along rings (`collectives.py` describes them). `xla` is one `psum`, for which
the compiler chooses the algorithm; on TPU that already is the two-dimensional one.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.parallel.collectives import all_reduce, follow_columns, follow_rows, reverse_route, visit_all_chips
from podscale.pod import ALL_AXES

BUCKET_BYTES = 32 * 2**20
PAYLOADS = ("float32", "bfloat16")


# --- strategies: sum a flat array over all devices -----------------------------------------------------------------


def _reduce_by_xla(x: jax.Array, wire: Any) -> jax.Array:
    return lax.psum(x.astype(wire), ALL_AXES).astype(x.dtype)


def _reduce_by_ring(x: jax.Array, wire: Any) -> jax.Array:
    return all_reduce([(visit_all_chips,)], x, wire)


def _reduce_by_ring2(x: jax.Array, wire: Any) -> jax.Array:
    return all_reduce([(visit_all_chips,), (reverse_route(visit_all_chips),)], x, wire)


def _reduce_by_torus(x: jax.Array, wire: Any) -> jax.Array:
    return all_reduce([(follow_rows, follow_columns)], x, wire)


def _reduce_by_torus4(x: jax.Array, wire: Any) -> jax.Array:
    rows_first = (follow_rows, follow_columns), (reverse_route(follow_rows), reverse_route(follow_columns))
    return all_reduce([*rows_first, *(path[::-1] for path in rows_first)], x, wire)


STRATEGIES: dict[str, Callable[[jax.Array, Any], jax.Array]] = {
    "xla": _reduce_by_xla,
    "ring": _reduce_by_ring,
    "ring2": _reduce_by_ring2,
    "torus": _reduce_by_torus,
    "torus4": _reduce_by_torus4,
}


# --- trees -------------------------------------------------------------------------------------------------------


def sum_tree(tree: Any, *, strategy: str, payload: str = "float32", bucket_bytes: int = BUCKET_BYTES) -> Any:
    """Sum every array of `tree` over all devices of the pod; every device gets the same bits.

    Args:
        tree: arrays; floats narrower than float32 are added in float32.
        strategy: a name in `STRATEGIES`.
        payload: the dtype that travels. "float32" sends the data as it is; "bfloat16" halves the bytes of floats, which
            the rings still add at full width (`xla` sums bfloat16 buffers, at whatever width the compiler adds them).
        bucket_bytes: leaves are fused into buffers of about this size, from the last leaf to the first, the order in
            which the backward pass finishes them; 0: one buffer per dtype.

    Returns:
        a tree of the same structure, shapes and dtypes.

    Raises:
        UserError: there is no such strategy or payload.
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
        parts = jnp.split(_sum_array(fused, strategy, payload), ends[:-1])
        for i, part in zip(bucket, parts, strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)


def make_buckets(leaves: Sequence[Any], bucket_bytes: int) -> list[list[int]]:
    """Return which leaves travel together, as lists of indices.

    Buckets run from the last leaf to the first and hold one dtype and at most `bucket_bytes` each. A leaf that is
    larger than a bucket travels alone.
    """
    limit = bucket_bytes or math.inf
    full, filling = [], dict[Any, tuple[list[int], int]]()  # `filling`: the open bucket of each dtype, and its bytes
    for i in reversed(range(len(leaves))):
        leaf = leaves[i]
        bucket, size = filling.get(leaf.dtype, ([], 0))
        if bucket and size + leaf.nbytes > limit:
            full.append(bucket)
            bucket, size = [], 0
        filling[leaf.dtype] = ([*bucket, i], size + leaf.nbytes)
    return full + [bucket for bucket, _ in filling.values()]


def _sum_array(x: jax.Array, strategy: str, payload: str) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return STRATEGIES[strategy](x, x.dtype)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return STRATEGIES[strategy](wide, jnp.bfloat16 if payload == "bfloat16" else wide.dtype).astype(x.dtype)
