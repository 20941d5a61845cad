"""Attention's kernels against the reference implementation, in the interpreter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podscale.kernels import attention
from podscale.kernels.attention_backward import run_backward
from podscale.kernels.attention_forward import Geometry, run_forward
from podscale.kernels.attention_limits import FIRST_JAX, can_attend
from podscale.kernels.layer_spec import CUDNN, TRITON
from podscale.kernels.matmul import make_interpreter

TOLERANCE = 0.0026  # of the norm; the reference implementation in bfloat16 differs by up to 0.0025 from float32


def draw(images, tokens, heads):
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (images, tokens, heads, 64), jnp.bfloat16) for key in keys]


def differentiate(function, q, k, v, gradient):
    out, pull = jax.vjp(function, q, k, v)
    return out, *pull(gradient)


def compute_expected(arrays, padding):
    wide = [array.astype(jnp.float32) for array in arrays]
    return differentiate(partial(attention.reference, padding=padding), *wide)


def assert_close(results, expected):
    for x, y in zip(results, expected, strict=True):
        assert x.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(x, np.float32) - y) < TOLERANCE * np.linalg.norm(y)


@pytest.mark.heavy
@pytest.mark.parametrize(("tokens", "padding", "heads"), [(72, 7, 2), (136, 0, 1)])
def test_result_and_gradients_equal_the_references(tokens, padding, heads):
    arrays = draw(1, tokens, heads)
    results = differentiate(partial(attention.attend, padding=padding, interpret=make_interpreter()), *arrays)
    assert_close(results, compute_expected(arrays, padding))


@pytest.mark.heavy
def test_queries_keys_and_values_may_be_one_array():
    *operands, gradient = arrays = draw(2, 72, 2)
    attend = partial(attention.attend_packed, padding=7, interpret=make_interpreter())
    out, pull = jax.vjp(attend, jnp.concatenate(operands, axis=2))
    gradients = jnp.split(pull(gradient)[0], 3, axis=2)
    assert_close([out, *gradients], compute_expected(arrays, padding=7))


@pytest.mark.heavy
def test_padding_has_no_gradient_as_keys_and_values():
    arrays = draw(1, 72, 1)
    *_, dk, dv = differentiate(partial(attention.attend, padding=7, interpret=make_interpreter()), *arrays)
    assert not dk[:, 65:].any()
    assert not dv[:, 65:].any()
    assert dk[:, :65].any(axis=-1).all()


@pytest.mark.heavy
def test_a_block_computes_several_pairs_of_image_and_head():
    images, tokens, heads, padding = 3, 72, 2, 7
    *operands, gradient = arrays = draw(images, tokens, heads)
    geometry = Geometry(images, tokens, heads, padding, interpreted=True, most_blocks=1)
    out, lse = run_forward(geometry, *operands, make_interpreter())
    gradients = run_backward(geometry, (*operands, gradient), lse, make_interpreter())
    assert_close([out, *gradients], compute_expected(arrays, padding))


@pytest.mark.skipif(jax.__version_info__ < FIRST_JAX, reason="this version of JAX has no such kernels")
def test_kernels_are_used_for_short_sequences_in_bfloat16():
    def uses_kernels(kernels=TRITON, tokens=200, width=384, dtype=jnp.bfloat16, padding=3):
        return can_attend(kernels, jax.ShapeDtypeStruct((8, tokens, width), dtype), 6, padding)

    assert uses_kernels()
    assert uses_kernels(tokens=64, padding=0)
    assert not uses_kernels(tokens=208)
    assert not uses_kernels(tokens=197)
    assert not uses_kernels(width=192)  # heads of 32
    assert not uses_kernels(dtype=jnp.float32)
    assert not uses_kernels(padding=200)
    assert not uses_kernels(kernels=CUDNN)
