"""Which parameters Muon updates as matrices, and stacks of those that have the same shape.

The kernel of a convolution is a matrix from height·width·inputs to outputs. The kernel of a dense layer is one as well,
except in the head (Jordan et al. 2024 leave the last layer to another rule); where a model does not say which layer
that is, dense layers are left out. A dense layer that computes queries, keys and values at once is three matrices.

A stack has the name of its shape, such as "3x3x64x64"; the optimizer's state, and with it every checkpoint, has these
names as keys.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath, keystr, tree_map_with_path
from jaxtyping import Array, Float, PyTree

from podscale.optim.newton_schulz import can_orthogonalize_jointly, count_products
from podscale.parallel.shared_matrices import Kind

Stacks = dict[str, Float[Array, "_kernels *_shape"]]  # by shape

FUSED_LAYERS = MappingProxyType({"qkv": 3})  # layers whose outputs are those of several, side by side
_FUSED = " in "  # between shape and number of matrices in a stack's name


@dataclass(frozen=True)
class Matrices:
    """Says which parameters are matrices, from their names and shapes.

    Args:
        head: path of the model's last layer; empty: not known.
        shapes: of all parameters, by name, where a device holds only a part of each array; None: arrays are whole.
    """

    head: str = ""
    shapes: Mapping[str, tuple[int, ...]] | None = None

    def label(self, params: PyTree) -> PyTree:
        """Return a tree like `params`: True where the parameter is a matrix."""
        return tree_map_with_path(lambda path, leaf: self._is_matrix(path, self._get_shape(path, leaf)), params)

    def stack(self, tree: PyTree) -> Stacks:
        """Return one stack of arrays per shape; all arrays of the tree must be matrices, or parts of some."""
        by_name: dict[str, list[Float[Array, ...]]] = {}
        for path, leaf in jax.tree.leaves_with_path(tree):
            by_name.setdefault(self._name_stack(path, leaf), []).append(leaf)
        return {name: jnp.stack(leaves) for name, leaves in by_name.items()}

    def unstack(self, stacks: Stacks, like: PyTree) -> PyTree:
        """Return the arrays of stacks as a tree like the one that was stacked."""
        rows = {name: iter(arrays) for name, arrays in stacks.items()}
        return tree_map_with_path(lambda path, leaf: next(rows[self._name_stack(path, leaf)]), like)

    def get_outputs(self, path: KeyPath, leaf: Float[Array, "..."]) -> int:
        """Return the outputs of a kernel, its last axis."""
        return self._get_shape(path, leaf)[-1]

    def _get_shape(self, path: KeyPath, leaf: Float[Array, "..."]) -> tuple[int, ...]:
        return leaf.shape if self.shapes is None else self.shapes[name_parameter(path)]

    def _is_matrix(self, path: KeyPath, shape: tuple[int, ...]) -> bool:
        name = name_parameter(path)
        is_dense = len(shape) == 2 and name.rpartition(".")[2] == "kernel"
        return len(shape) == 4 or (is_dense and bool(self.head) and not name.startswith(f"{self.head}."))

    def _name_stack(self, path: KeyPath, leaf: Float[Array, "..."]) -> str:
        blocks = FUSED_LAYERS.get(name_parameter(path).split(".")[-2] if len(path) > 1 else "", 1)
        return "x".join(map(str, self._get_shape(path, leaf))) + (f"{_FUSED}{blocks}" if blocks > 1 else "")


def name_parameter(path: KeyPath) -> str:
    """Return the name of a parameter, such as "layers.1.conv.kernel"."""
    return keystr(path, simple=True, separator=".")


def count_blocks(name: str) -> int:
    """Return how many matrices each array of a stack holds side by side.

    >>> count_blocks("384x1152 in 3"), count_blocks("3x3x64x64")
    (3, 1)
    """
    return int(name.partition(_FUSED)[2] or 1)


def get_shape(name: str) -> tuple[int, ...]:
    """Return the shape of each array of a stack.

    >>> get_shape("384x1152 in 3")
    (384, 1152)
    """
    return tuple(map(int, name.partition(_FUSED)[0].split("x")))


# --- work ------------------------------------------------------------------------------------------------------------


def describe_stacks(counts: Mapping[str, int], steps: int, precision: str) -> dict[str, Kind]:
    """Return number, shape and floating-point operations of the matrices of each stack.

    Args:
        counts: arrays in each stack.
        steps: number of Newton-Schulz iterations.
        precision: the model's.
    """
    shares_gram = is_joint(counts, precision)
    return {
        name: Kind(count, get_shape(name), _count_flops(name, steps, shares_gram)) for name, count in counts.items()
    }


def list_matrices(params: PyTree, head: str, steps: int, precision: str) -> dict[str, Kind]:
    """Return the matrices among whole parameters, which may be abstract, by stack."""
    matrices, counts = Matrices(head), dict[str, int]()
    for path, leaf in jax.tree.leaves_with_path(params):
        if matrices._is_matrix(path, leaf.shape):
            name = matrices._name_stack(path, leaf)
            counts[name] = counts.get(name, 0) + 1
    return describe_stacks(counts, steps, precision)


def is_joint(names: Mapping[str, object], precision: str) -> bool:
    """Return whether the matrices of these stacks go through iterations on their Gram matrices."""
    return can_orthogonalize_jointly([_get_block_shape(name) for name in names], precision)


def _get_block_shape(name: str) -> tuple[int, ...]:
    shape = get_shape(name)
    return (*shape[:-1], shape[-1] // count_blocks(name))


def _count_flops(name: str, steps: int, shares_gram: bool) -> float:
    """Return the operations of orthogonalizing one array: products of X and A, most of A alone if it is shared."""
    *inputs, outputs = _get_block_shape(name)
    side, length = sorted((math.prod(inputs), outputs))
    with_matrix, with_gram = 2.0 * side**2 * length, 2.0 * side**3
    of_grams, of_matrices = count_products(steps) if shares_gram else (steps, 2 * steps)
    return count_blocks(name) * (of_grams * with_gram + of_matrices * with_matrix)
