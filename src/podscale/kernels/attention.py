"""Attention over up to 200 tokens on Hopper GPUs, as one kernel each way, of FlashAttention's kind.

    out = softmax(q kᵀ / √d) v  for each image and head, of d = 64

Scores are neither stored nor, because a whole row of them fits a warpgroup's registers, rescaled; the backward pass
computes them again from the logarithms of their sums (Dao et al. 2022, arXiv 2205.14135, section 3.1 and appendix B).
Kernels for sequences of any length divide 197 tokens of a Vision Transformer into two blocks of 128 each way.

The kernels are Pallas kernels for Mosaic GPU: `attention_forward.py` and `attention_backward.py`.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podscale.kernels.attention_backward import run_backward
from podscale.kernels.attention_forward import DEPTH, Geometry, Interpreter, Tokens, run_forward


def attend(q: Tokens, k: Tokens, v: Tokens, *, padding: int = 0, interpret: Interpreter | None = None) -> Tokens:
    """Return softmax(q kᵀ / √d) v for each image and head.

    Args:
        q: queries.
        k: keys.
        v: values.
        padding: tokens at the end that no token attends to. They attend to the others, so that they stay finite.
        interpret: parameters of the interpreter, to run without a GPU.

    Reference:
        Dao et al. 2022, arXiv 2205.14135.
    """
    return _attend(padding, interpret, q, k, v)


def attend_packed(
    qkv: Float[Array, "images tokens all_heads 64"], *, padding: int = 0, interpret: Interpreter | None = None
) -> Tokens:
    """Return the same for queries, keys and values as one array: the first, second and last third of its heads.

    One matrix product can then make all three, and one takes the gradient by all three.
    """
    return _attend_packed(padding, interpret, qkv)


def reference(q: Tokens, k: Tokens, v: Tokens, *, padding: int = 0) -> Tokens:
    """Return what `attend` does, with weights in at least float32; XLA differentiates it."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("ithd,ishd->ihts", q, k, preferred_element_type=wide) / DEPTH**0.5
    is_attended = jnp.arange(k.shape[1]) < k.shape[1] - padding
    weights = jax.nn.softmax(jnp.where(is_attended, scores, -jnp.inf))
    return jnp.einsum("ihts,ishd->ithd", weights.astype(v.dtype), v)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(padding: int, interpret: Interpreter | None, q: Tokens, k: Tokens, v: Tokens) -> Tokens:
    return _save_for_backward(padding, interpret, q, k, v)[0]


def _save_for_backward(
    padding: int, interpret: Interpreter | None, q: Tokens, k: Tokens, v: Tokens
) -> tuple[Tokens, tuple[Array, ...]]:
    out, lse = run_forward(_describe(padding, interpret, q), q, k, v, interpret)
    return out, (q, k, v, lse)


def _backward(
    padding: int, interpret: Interpreter | None, residuals: tuple[Array, ...], gradient: Tokens
) -> tuple[Tokens, ...]:
    q, k, v, lse = residuals
    return tuple(run_backward(_describe(padding, interpret, q), (q, k, v, gradient), lse, interpret))


def _describe(padding: int, interpret: Interpreter | None, q: Tokens) -> Geometry:
    images, tokens, heads, _ = q.shape
    return Geometry(images, tokens, heads, padding, interpreted=interpret is not None)


_attend.defvjp(_save_for_backward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_packed(padding: int, interpret: Interpreter | None, qkv: Array) -> Tokens:
    return _save_packed(padding, interpret, qkv)[0]


def _save_packed(padding: int, interpret: Interpreter | None, qkv: Array) -> tuple[Tokens, tuple[Array, Array]]:
    out, lse = run_forward(_describe_packed(padding, interpret, qkv), qkv, qkv, qkv, interpret)
    return out, (qkv, lse)


def _backpropagate_packed(
    padding: int, interpret: Interpreter | None, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array]:
    qkv, lse = residuals
    geometry = _describe_packed(padding, interpret, qkv)
    (dqkv,) = run_backward(geometry, (qkv, qkv, qkv, gradient), lse, interpret)
    return (dqkv,)


def _describe_packed(padding: int, interpret: Interpreter | None, qkv: Array) -> Geometry:
    return replace(_describe(padding, interpret, qkv), heads=qkv.shape[2] // 3, is_packed=True)


_attend_packed.defvjp(_save_packed, _backpropagate_packed)
