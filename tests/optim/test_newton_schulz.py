"""Newton-Schulz iterations on Gram matrices against the iterations on the matrices themselves."""

import jax.numpy as jnp
import numpy as np
import pytest

from podscale.optim.newton_schulz import COEFFICIENTS, can_orthogonalize_jointly, orthogonalize_jointly


def orthogonalize_reference(kernel, steps):
    """Return what the iterations on the matrix itself give, in float64."""
    a, b, c = COEFFICIENTS
    x = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1])
    x = x / np.linalg.norm(x)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.reshape(kernel.shape)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_iterations_on_gram_matrices_give_what_iterations_on_the_matrices_give(steps):
    """For long and wide matrices of several smaller sides, one of them with a column of zeros."""
    random = np.random.default_rng(0)
    shapes = [(3, 3, 24, 64), (3, 3, 4, 8), (1, 1, 8, 64), (1, 1, 100, 120), (3, 3, 4, 8)]
    kernels = [jnp.asarray(random.normal(size=shape), jnp.bfloat16).astype(jnp.float32) for shape in shapes]
    kernels[1] = kernels[1].at[..., 0].set(0)
    for kernel, result in zip(kernels, orthogonalize_jointly(kernels, steps), strict=True):
        expected = orthogonalize_reference(kernel, steps)
        assert (result.shape, result.dtype) == (kernel.shape, kernel.dtype)
        assert np.linalg.norm(result - expected) < 2e-3 * np.linalg.norm(expected)


def test_a_kernel_of_zeros_stays_zero():
    np.testing.assert_array_equal(orthogonalize_jointly([jnp.zeros((1, 1, 4, 4))], 3)[0], 0)


def test_large_kernels_and_finer_precisions_are_not_orthogonalized_jointly():
    small, large = (1, 1, 4, 4), (1, 1, 300, 257)
    assert can_orthogonalize_jointly([small], "bfloat16")
    assert not can_orthogonalize_jointly([small, large], "bfloat16")
    assert not can_orthogonalize_jointly([small], "float32")
    assert not can_orthogonalize_jointly([], "bfloat16")
