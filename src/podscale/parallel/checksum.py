"""Checksums of arrays: one number each, which any single flipped bit changes.

Every 32-bit word of an array is multiplied by an odd number that belongs to its index, and the products are added up
modulo 2**32. Integers add up to the same in any order, so a checksum does not depend on the device, the sharding or the
pod: a checkpoint written on one pod can be verified on any other, and replicas can be distinguished by their checksums
alone. Multiplication by an odd factor is invertible, so a word that differs in any of its bits always changes the sum.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from podscale.pod import ALL_AXES

MULTIPLIER = 0x9E3779B1  # 2**32 over the golden ratio: the factors of neighbors have little in common


@jax.jit
def checksum_arrays(tree: PyTree) -> jax.Array:
    """Return the checksum of every array of a tree, uint32 [arrays], in the order of the tree's leaves.

    >>> a, b = jnp.arange(6.0), jnp.arange(6.0).at[3].set(3.0000002)
    >>> first, changed, reshaped = (int(checksum_arrays([x])[0]) for x in (a, b, a.reshape(2, 3)))
    >>> first == changed, first == reshaped
    (False, True)
    """
    return jnp.stack([_checksum_array(leaf) for leaf in jax.tree.leaves(tree)])


def make_replica_checksum(mesh: Mesh) -> Callable[[PyTree], jax.Array]:
    """Return a function of replicated arrays that checksums the copy of each device: [devices of the mesh, arrays].

    Every process gets the checksums of all devices, so that it sees whether its own copy is the one that differs.
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


def _checksum_array(array: jax.Array) -> jax.Array:
    words = _view_as_uint32(jnp.asarray(array)).ravel()
    indices = lax.iota(jnp.uint32, words.size)
    return jnp.sum(words * (indices * jnp.uint32(MULTIPLIER) | jnp.uint32(1)), dtype=jnp.uint32)


def _view_as_uint32(array: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32; narrower values are widened."""
    if jnp.issubdtype(array.dtype, jnp.bool_):
        return array.astype(jnp.uint32)
    bits = array.dtype.itemsize * 8
    if bits >= 32:
        return lax.bitcast_convert_type(array, jnp.uint32)
    narrow = lax.bitcast_convert_type(array, jnp.uint16 if bits == 16 else jnp.uint8)
    return narrow.astype(jnp.uint32)
