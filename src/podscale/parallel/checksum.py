"""Digests: what arrays hold, as one number each. Any single flipped bit changes it, and nothing else does.

Every 32-bit word of an array is multiplied by an odd number that belongs to its place, and the products are added up
modulo 2**32. Whole numbers add up to the same in any order, so a digest does not depend on the device, the sharding or
the pod: a checkpoint written on one can be verified on any other, and replicas can be told apart by their digests
alone. An odd factor can be undone, so a word that differs in whatever bits always changes the sum.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podscale.pod import ALL_AXES

SPREAD = 0x9E3779B1  # 2**32 over the golden ratio: neighbours get factors that have little in common


@jax.jit
def checksum_arrays(tree: Any) -> jax.Array:
    """The digest of every array of a tree, uint32 [arrays], in the order of the tree's leaves.

    >>> a, b = jnp.arange(6.0), jnp.arange(6.0).at[3].set(3.0000002)
    >>> one, other, again = (int(of([x])[0]) for x in (a, b, a.reshape(2, 3)))
    >>> one == other, one == again
    (False, True)
    """
    return jnp.stack([_one(leaf) for leaf in jax.tree.leaves(tree)])


def make_replica_checksum(mesh: Mesh) -> Callable[[Any], jax.Array]:
    """A function of replicated arrays: the digests of the copy that each device holds, [devices of the mesh, arrays].

    Every process gets all of them, to see whether its own copy is the odd one out.
    """
    mapped = jax.shard_map(
        lambda copy: lax.all_gather(checksum_arrays(copy), ALL_AXES),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        axis_names=set(ALL_AXES),
        check_vma=False,
    )
    return jax.jit(mapped)


def _one(array: jax.Array) -> jax.Array:
    words = _words(jnp.asarray(array)).ravel()
    places = lax.iota(jnp.uint32, words.size)
    return jnp.sum(words * (places * jnp.uint32(SPREAD) | jnp.uint32(1)), dtype=jnp.uint32)


def _words(array: jax.Array) -> jax.Array:
    """The bits of an array as uint32; narrower values are widened."""
    if jnp.issubdtype(array.dtype, jnp.bool_):
        return array.astype(jnp.uint32)
    bits = array.dtype.itemsize * 8
    if bits >= 32:
        return lax.bitcast_convert_type(array, jnp.uint32)
    narrow = lax.bitcast_convert_type(array, jnp.uint16 if bits == 16 else jnp.uint8)
    return narrow.astype(jnp.uint32)
