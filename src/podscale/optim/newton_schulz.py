"""Newton-Schulz iterations on several kernels at once, through their Gram matrices.

An iteration (Jordan et al. 2024, kellerjordan.github.io/posts/muon) takes a matrix X to (aI + bA + cA²)X with A = XXᵀ.
Every factor is a polynomial of the first A, so all of them commute, and the next A follows from the last one without X:
A ← A(aI + bA + cA²)². So the iterations need A alone, whose side is the smaller of X's, and X is multiplied once, at
the end. Matrices of different shapes become one stack, which on a GPU replaces many small kernels by a few.

A has the squares of X's singular values, so small ones lose digits: the result is exact to about 1e-3, less than
bfloat16 rounds anyway. Models of other precisions and larger ones iterate on X itself, as optax does, which is the
reference implementation.
"""

import math
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c; optax has the same
MAX_SIDE = 256  # largest Gram matrix that others are padded to; larger networks were not timed
LOW_PRECISION_STEPS = 3  # with more, products of A keep all of float32: errors grow by a² a step
EPSILON = 1e-8  # added to norms, which may be 0


def can_orthogonalize_jointly(shapes: list[tuple[int, ...]], precision: str) -> bool:
    """Return whether kernels of these shapes may go through the iterations as one stack.

    They must be small enough to be padded to one size, and the model must round more coarsely than the iterations on A.
    """
    return precision == "bfloat16" and bool(shapes) and max(map(_measure_side, shapes)) <= MAX_SIDE


def orthogonalize_jointly(
    kernels: list[Float[Array, "... _inputs _outputs"]], steps: int
) -> list[Float[Array, "... _inputs _outputs"]]:
    """Return every kernel, as a matrix [inputs, outputs], after Newton-Schulz iterations from its Frobenius norm 1.

    The more steps, the closer all singular values come to 1; singular vectors stay. Kernels are rounded to bfloat16
    first; the iterations on A are in float32.

    Args:
        kernels: arrays whose last axis is that of the outputs; `can_orthogonalize_jointly` says which fit.
        steps: number of iterations.

    Returns:
        arrays of the same shapes and dtypes.
    """
    matrices = [kernel.reshape(-1, kernel.shape[-1]).astype(jnp.bfloat16) for kernel in kernels]
    sides = [_measure_side(kernel.shape) for kernel in kernels]
    factors = _compute_factors(jnp.stack([_compute_gram(matrix, max(sides)) for matrix in matrices]), steps)
    results = []
    for kernel, matrix, side, factor in zip(kernels, matrices, sides, factors, strict=True):
        product = _multiply(matrix, factor[:side, :side])
        results.append(product.reshape(kernel.shape).astype(kernel.dtype))
    return results


def _measure_side(shape: tuple[int, ...]) -> int:
    """Return the smaller side of a kernel as a matrix [..., outputs]."""
    return min(math.prod(shape[:-1]), shape[-1])


def _compute_gram(matrix: Float[Array, "inputs outputs"], side: int) -> Float[Array, "{side} {side}"]:
    """Return the product of a matrix with itself over its longer axis, padded with zeros."""
    longer = 0 if matrix.shape[0] >= matrix.shape[1] else 1
    gram = lax.dot_general(matrix, matrix, (((longer,), (longer,)), ((), ())), preferred_element_type=jnp.float32)
    missing = side - gram.shape[0]
    return jnp.pad(gram, (0, missing)) if missing else gram


def _compute_factors(grams: Float[Array, "kernels side side"], steps: int) -> Float[Array, "kernels side side"]:
    """Return what the iterations multiply each matrix by, its norm included; symmetric."""
    a, b, c = COEFFICIENTS
    identity = jnp.eye(grams.shape[-1], dtype=grams.dtype)
    matmul = partial(jnp.matmul, precision=None if steps <= LOW_PRECISION_STEPS else lax.Precision.HIGHEST)
    norms = jnp.sqrt(jnp.trace(grams, axis1=1, axis2=2))[:, None, None] + EPSILON
    gram, product = grams / (norms * norms), identity / norms
    for step in range(steps):
        factor = a * identity + b * gram + c * matmul(gram, gram)
        product = factor / norms if step == 0 else matmul(factor, product)
        if step < steps - 1:
            gram = matmul(matmul(factor, gram), factor)
    return product


def _multiply(
    matrix: Float[Array, "inputs outputs"], factor: Float[Array, "side side"]
) -> Float[Array, "inputs outputs"]:
    """Return the matrix times a symmetric factor, from the side where it fits."""
    wide = matrix.astype(factor.dtype)
    return wide @ factor if matrix.shape[0] >= matrix.shape[1] else factor @ wide
