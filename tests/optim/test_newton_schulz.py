"""Newton-Schulz iterations on Gram matrices against the iterations on the matrices themselves."""

import jax.numpy as jnp
import numpy as np
import pytest

from podscale.optim.newton_schulz import (
    COEFFICIENTS,
    can_orthogonalize_jointly,
    count_products,
    orthogonalize_jointly,
)


def orthogonalize_reference(matrices, steps):
    """Return what the iterations on the matrices themselves give, in float64."""
    return iterate(np.asarray(matrices, np.float64), steps, lambda x: x)


def orthogonalize_in_bfloat16(matrices, steps):
    """Return the same with every result rounded to bfloat16, as in the code of Jordan et al. 2024."""
    return iterate(round_to_bfloat16(matrices), steps, round_to_bfloat16)


def round_to_bfloat16(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


def iterate(x, steps, round_result):
    if x.shape[1] > x.shape[2]:
        return iterate(x.transpose(0, 2, 1), steps, round_result).transpose(0, 2, 1)
    a, b, c = COEFFICIENTS
    x = round_result(x / np.linalg.norm(x, axis=(1, 2), keepdims=True))
    for _ in range(steps):
        gram = round_result(x @ x.transpose(0, 2, 1))
        polynomial = round_result(b * gram + c * round_result(gram @ gram))
        x = round_result(a * x + round_result(polynomial @ x))
    return x


def measure_error(result, expected):
    return np.linalg.norm(np.asarray(result, np.float64) - expected) / np.linalg.norm(expected)


def draw_stacks(shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.bfloat16).astype(jnp.float32) for shape in shapes]


SHAPES = [(1, 216, 64), (2, 36, 8), (1, 8, 64), (1, 100, 120), (2, 300, 280)]


@pytest.mark.parametrize("steps", [1, 3])
def test_iterations_on_gram_matrices_give_what_iterations_on_the_matrices_give(steps):
    """For long and wide matrices of several smaller sides, one of them with a column of zeros."""
    stacks = draw_stacks(SHAPES)
    stacks[1] = stacks[1].at[0, :, 0].set(0)
    for stack, result in zip(stacks, orthogonalize_jointly(stacks, steps), strict=True):
        assert (result.shape, result.dtype) == (stack.shape, stack.dtype)
        for matrix, expected in zip(result, orthogonalize_reference(stack, steps), strict=True):
            assert measure_error(matrix, expected) < 2e-3


@pytest.mark.parametrize("steps", [4, 5, 7])
def test_many_iterations_lose_less_than_iterations_in_bfloat16(steps):
    stacks = draw_stacks(SHAPES)
    for stack, result in zip(stacks, orthogonalize_jointly(stacks, steps), strict=True):
        expected = orthogonalize_reference(stack, steps)
        assert measure_error(result, expected) < 0.7 * measure_error(orthogonalize_in_bfloat16(stack, steps), expected)


def round_to_tensor_float(x):
    """Round to 10 bits after the leading one, which is what tensor cores keep of float32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).view(np.float32)


def make_ill_conditioned(rows, columns, decades):
    """Return a matrix whose singular values lie evenly, in logarithm, over some powers of ten."""
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.normal(size=(side, rows)))[0] for side in (rows, columns))
    return ((left * np.logspace(0, -decades, rows)) @ right.T).astype(np.float32)


@pytest.mark.parametrize("decades", [2, 4])
@pytest.mark.parametrize("columns", [64, 576])
def test_ill_conditioned_matrices_lose_less_than_in_bfloat16_also_in_the_float32_of_tensor_cores(
    columns, decades, monkeypatch
):
    """Singular values that the iterations amplify most are those of which rounding leaves least."""
    matrix = make_ill_conditioned(64, columns, decades)[None]
    exact = jnp.matmul

    def multiply(x, y, **options):
        if x.dtype == jnp.float32:
            x, y = (jnp.asarray(round_to_tensor_float(side)) for side in (x, y))
        return exact(x, y, **options)

    monkeypatch.setattr(jnp, "matmul", multiply)
    (result,) = orthogonalize_jointly([jnp.asarray(matrix)], 5)
    expected = orthogonalize_reference(matrix, 5)
    errors = [measure_error(x, expected) for x in (result, orthogonalize_in_bfloat16(matrix, 5))]
    assert errors[0] < errors[1]


def test_a_kernel_of_zeros_stays_zero():
    np.testing.assert_array_equal(orthogonalize_jointly([jnp.zeros((1, 4, 4))], 3)[0], 0)


def test_large_kernels_and_finer_precisions_are_not_orthogonalized_jointly():
    small, large = (1, 1, 4, 4), (1, 1, 1100, 1025)
    assert can_orthogonalize_jointly([small], "bfloat16")
    assert not can_orthogonalize_jointly([small, large], "bfloat16")
    assert not can_orthogonalize_jointly([small], "float32")
    assert not can_orthogonalize_jointly([], "bfloat16")


def test_products_are_counted_for_long_matrices_and_square_ones():
    """Iterations on Gram matrices have fewer operations than iterations on X, but for square matrices."""
    of_grams, of_matrices = count_products(5)
    assert of_grams + 9 * of_matrices < 0.6 * (5 + 9 * 10)
    assert of_grams + of_matrices > 5 + 10
