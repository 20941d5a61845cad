"""Checksums of arrays: one number each, which any single flipped bit changes.

Every 32-bit word of an array is multiplied by an odd number that belongs to its index, and the products are added up
modulo 2**32. Integers add up to the same in any order, so a checksum does not depend on the device, the sharding or the
pod: a checkpoint written on one pod can be verified on any other, and replicas can be distinguished by their checksums
alone. Multiplication by an odd factor is invertible, so a word that differs in any of its bits always changes the sum.

On devices the checksums are a compiled program, on the host a loop of NumPy; both give the same numbers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree
from numpy.typing import NDArray

from podscale.pod import ALL_AXES

MULTIPLIER = 0x9E3779B1  # 2**32 over the golden ratio: the factors of neighbors have little in common
MODULUS = 2**32
BLOCK_WORDS = 2**15  # that the host works on at a time: they and their factors stay in the processor's cache


@jax.jit
def checksum_arrays(tree: PyTree) -> jax.Array:
    """Return the checksum of every array of a tree, uint32 [arrays], in the order of the tree's leaves.

    >>> a, b = jnp.arange(6.0), jnp.arange(6.0).at[3].set(3.0000002)
    >>> first, changed, reshaped = (int(checksum_arrays([x])[0]) for x in (a, b, a.reshape(2, 3)))
    >>> first == changed, first == reshaped
    (False, True)
    """
    return jnp.stack([_checksum_array(leaf) for leaf in jax.tree.leaves(tree)])


def checksum_host_array(values: NDArray, first: int = 0) -> int:
    """Return the checksum of a flat array on the host, or of a part of one: it needs no device and no compilation.

    Args:
        values: contiguous values, in one dimension.
        first: the index of the first of them in the whole array. The checksums of its parts add up, modulo 2**32.

    >>> array = np.arange(6.0)
    >>> checksum_host_array(array) == int(checksum_arrays([array.astype(np.float32)])[0])
    False
    >>> whole, parts = checksum_host_array(array), [checksum_host_array(array[:2]), checksum_host_array(array[2:], 2)]
    >>> whole == sum(parts) % MODULUS
    True
    """
    words = _view_words(values)
    first = first * words.size // max(values.size, 1)
    steps = np.arange(min(words.size, BLOCK_WORDS), dtype=np.uint32) * np.uint32(MULTIPLIER)
    total = 0
    for start in range(0, words.size, BLOCK_WORDS):
        block = words[start : start + BLOCK_WORDS]
        factors = steps[: block.size] + np.uint32((first + start) * MULTIPLIER % MODULUS)
        factors |= np.uint32(1)
        factors *= block
        total += int(factors.sum(dtype=np.uint32))
    return total % MODULUS


def _view_words(values: NDArray) -> NDArray:
    """Return the bits of values on the host as unsigned integers of 32 bits, or of fewer if they are narrower."""
    return values.view({1: np.uint8, 2: np.uint16}.get(values.dtype.itemsize, np.uint32))


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
