"""Newton-Schulz iterations on the matrices of a whole network at once, through their Gram matrices.

An iteration (Jordan et al. 2024, kellerjordan.github.io/posts/muon) takes a matrix X to (aI + bA + cA²)X with A = XXᵀ.
Every factor is a polynomial of the first A, so all of them commute, and the next A follows from the last one without X:
A ← A(aI + bA + cA²)². So the iterations need A alone, whose side is the smaller of X's. Matrices of different shapes
become a few stacks, which on a GPU replaces many small kernels by a few.

A has the squares of X's singular values, and an iteration multiplies small ones by up to a², and with them the rounding
errors of A. So after three iterations X is multiplied, rounded to bfloat16, and A is computed again. Products of A then
need no more than the float32 of tensor cores (10 bits), and errors stay below those that the iterations on X have in
bfloat16 (`benchmarks/newton_schulz.py`).

Models of other precisions, and larger ones, iterate on X itself, as optax does, which is the reference implementation.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Matrices = Float[Array, "_matrices _inputs _outputs"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c; optax has the same
MAX_SIDE = 1024  # of Gram matrices; larger networks were not tried
SMALL_SIDE = 256  # Gram matrices of up to this side are padded to one size
BLOCK = 128  # larger ones are padded to a multiple of this side
STEPS_PER_GRAM = 3  # iterations on A between two products with X
EPSILON = 1e-8  # added to norms, which may be 0


def can_orthogonalize_jointly(shapes: Sequence[tuple[int, ...]], precision: str) -> bool:
    """Return whether kernels of these shapes may go through the iterations on Gram matrices.

    These must be small enough, and the model must round more coarsely than the iterations do.
    """
    return precision == "bfloat16" and bool(shapes) and max(map(measure_side, shapes)) <= MAX_SIDE


def orthogonalize_jointly(kernels: Sequence[Matrices], steps: int) -> list[Matrices]:
    """Return every matrix [inputs, outputs] after Newton-Schulz iterations from its Frobenius norm 1.

    The more steps, the closer all singular values come to 1; singular vectors stay. Matrices are rounded to bfloat16
    first; the iterations on A are in float32.

    Args:
        kernels: stacks of matrices of one shape each; `can_orthogonalize_jointly` says which shapes fit.
        steps: number of iterations.

    Returns:
        arrays of the same shapes and dtypes.
    """
    phases, matrices = split_steps(steps), [stack.astype(jnp.bfloat16) for stack in kernels]
    between, last = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    operand, precision = (between, lax.Precision.HIGH) if len(phases) > 1 else (last, None)  # on GPUs, both are TF32
    for i, count in enumerate(phases):
        factors = _compute_all_factors([_compute_grams(x) for x in matrices], count, precision, normalizes=i == 0)
        result = last if i == len(phases) - 1 else between
        matrices = [
            _multiply(x.astype(operand), factor.astype(operand), result)
            for x, factor in zip(matrices, factors, strict=True)
        ]
    return [x.astype(stack.dtype) for x, stack in zip(matrices, kernels, strict=True)]


def split_steps(steps: int) -> list[int]:
    """Return the numbers of iterations on A between products with X.

    >>> split_steps(3), split_steps(5)
    ([3], [3, 2])
    """
    return [min(STEPS_PER_GRAM, steps - start) for start in range(0, steps, STEPS_PER_GRAM)]


def count_products(steps: int) -> tuple[int, int]:
    """Return how many products of A with itself the iterations take, and how many of X with X or A.

    >>> count_products(1), count_products(5)
    ((1, 2), (14, 4))
    """
    phases = split_steps(steps)
    return sum(4 * count - 3 for count in phases), 2 * len(phases)


def measure_side(shape: tuple[int, ...]) -> int:
    """Return the smaller side of a kernel as a matrix [..., outputs].

    >>> measure_side((3, 3, 64, 128))
    128
    """
    return min(math.prod(shape[:-1]), shape[-1])


def _compute_grams(matrices: Matrices) -> Float[Array, "_matrices _side _side"]:
    """Return the products of matrices with themselves over their longer axis, in float32."""
    _, inputs, outputs = matrices.shape
    longer = 1 if inputs >= outputs else 2
    return lax.dot_general(
        matrices, matrices, (((longer,), (longer,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )


def _multiply(matrices: Matrices, factors: Float[Array, "_matrices _side _side"], dtype: jnp.dtype) -> Matrices:
    """Return each matrix times a symmetric factor, from the side where it fits."""
    _, inputs, outputs = matrices.shape
    operands = (matrices, factors) if inputs >= outputs else (factors, matrices)
    return jnp.matmul(*operands, preferred_element_type=dtype)


# --- Gram matrices ---------------------------------------------------------------------------------------------------


def _compute_all_factors(
    grams: Sequence[Float[Array, "_matrices _side _side"]],
    steps: int,
    precision: lax.Precision | None,
    *,
    normalizes: bool,
) -> list[Float[Array, "_matrices _side _side"]]:
    """Return what the iterations multiply the matrices of each stack by; Gram matrices of similar sides go together."""
    sides = [gram.shape[-1] for gram in grams]
    factors = list(grams)
    for size, members in _group_sides(sides).items():
        padded = [jnp.pad(grams[i], [(0, 0), *[(0, size - sides[i])] * 2]) for i in members]
        joined, start = _compute_factors(jnp.concatenate(padded), steps, precision, normalizes=normalizes), 0
        for i in members:
            stop = start + len(grams[i])
            factors[i], start = joined[start:stop, : sides[i], : sides[i]], stop
    return factors


def _group_sides(sides: Sequence[int]) -> dict[int, list[int]]:
    """Return the positions of the sides that are padded to the same one, by that one.

    >>> _group_sides([64, 200, 320, 384, 512])
    {200: [0, 1], 384: [2, 3], 512: [4]}
    """
    small = max((side for side in sides if side <= SMALL_SIDE), default=0)
    groups: dict[int, list[int]] = {}
    for i, side in enumerate(sides):
        groups.setdefault(small if side <= SMALL_SIDE else -(-side // BLOCK) * BLOCK, []).append(i)
    return groups


def _compute_factors(
    grams: Float[Array, "matrices side side"], steps: int, precision: lax.Precision | None, *, normalizes: bool
) -> Float[Array, "matrices side side"]:
    """Return what the iterations multiply each matrix by; symmetric. With `normalizes`, its norm is part of it."""
    a, b, c = COEFFICIENTS
    multiply = partial(jnp.matmul, precision=precision)
    identity = jnp.eye(grams.shape[-1], dtype=grams.dtype)
    norms = jnp.sqrt(jnp.trace(grams, axis1=1, axis2=2))[:, None, None] + EPSILON if normalizes else jnp.float32(1)
    gram, product = grams / (norms * norms), identity
    for step in range(steps):
        factor = a * identity + b * gram + c * multiply(gram, gram)
        product = factor / norms if step == 0 else multiply(factor, product)
        if step < steps - 1:  # the factor on the right, or XLA would copy arrays to compute this with the product above
            gram = multiply(multiply(gram, factor), factor)
    return product
