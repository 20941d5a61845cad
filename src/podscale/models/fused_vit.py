"""A Vision Transformer in fewer passes over memory: the same function as `vit.VisionTransformer`, by its parameters.

A block's sum is made where it is normalized, and with it the bias of the layer before is added
(`kernels/layer_norm.py`); the MLP's first bias is added where GELU is (`kernels/gelu.py`). Tokens are padded to a
multiple of 8. Attention is a kernel that takes queries, keys and values as one product makes them
(`kernels/attention.py`). Where there are too many tokens for it, it is cuDNN's; queries, keys and values then come from
a product each, because cuDNN takes three arrays, into which the result of one product would have to be copied.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from podscale.kernels.attention_limits import can_attend
from podscale.kernels.bias import add_bias
from podscale.kernels.gelu import add_bias_and_gelu
from podscale.kernels.layer_norm import add_and_normalize
from podscale.kernels.layer_spec import Kernels
from podscale.models.vit import Attention, Block, VisionTransformer, attend_fused


def can_fuse(model: Any, kernels: Kernels | None) -> bool:
    """Return whether a model is a Vision Transformer of bfloat16, and `kernels` are for it."""
    return bool(kernels and kernels.are_pallas) and type(model) is VisionTransformer and model.dtype == jnp.bfloat16


class Tokens(NamedTuple):
    """Tokens [images, tokens, width] as a sum that is still to be made: x + y + bias."""

    x: jax.Array
    y: jax.Array | None = None
    bias: jax.Array | None = None

    def normalize(self, kernels: Kernels, norm: nnx.LayerNorm, copies: int = 1) -> tuple[jax.Array, ...]:
        """Return the sum, and copies of its layer norm."""
        parameters = norm.scale[...], norm.bias[...]  # type: ignore[index]
        return add_and_normalize(kernels, *self, parameters, norm.epsilon, copies)


def forward(net: VisionTransformer, images: jax.Array, kernels: Kernels) -> jax.Array:
    """Return the same logits as `net(images)`."""
    net.use_kernels(kernels)
    embedding, *blocks, norm, head = list[Any](net.layers)
    tokens = Tokens(embedding(images))
    for block in blocks:
        apply = nnx.remat(apply_block, static_argnums=0) if net.remat else apply_block
        tokens = apply(kernels, block, tokens)
    count = 1 if net.has_token else embedding.count_tokens()
    x = tokens.x[:, :count]
    if tokens.y is not None:
        x = x + tokens.y[:, :count] + (0 if tokens.bias is None else tokens.bias.astype(x.dtype))
    return head(net.dropout(norm(x).mean(axis=1, dtype=head.kernel.dtype)))


def apply_block(kernels: Kernels, block: Block, tokens: Tokens) -> Tokens:
    """Return the tokens after a block."""
    attention = block.attention
    if can_attend(kernels, tokens.x, attention.heads, attention.padding):
        x, normalized = tokens.normalize(kernels, block.norm1)
        branch = attend_packed(kernels, attention, normalized)
    else:
        x, *copies = tokens.normalize(kernels, block.norm1, copies=3)
        branch = attend(kernels, attention, copies)
    tokens = _add_branch(x, *branch, block.drop_path1)
    x, h = tokens.normalize(kernels, block.norm2)
    expand, project = block.mlp.expand, block.mlp.project
    hidden = add_bias_and_gelu(kernels, _multiply(h, expand), expand.bias[...])  # type: ignore[index]
    return _add_branch(x, _multiply(hidden, project), project.bias[...], block.drop_path2)  # type: ignore[index]


def attend_packed(kernels: Kernels, attention: Attention, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the attention of normalized tokens, and a bias that is to be added, by kernels of our own."""
    from podscale.kernels import attention as attention_kernels  # it imports Pallas, which takes a second
    from podscale.kernels.matmul import make_interpreter

    images, tokens, _ = x.shape
    query_bias, bias = _split_biases(attention)
    qkv = add_bias(kernels, _multiply(x, attention.qkv), query_bias)
    y = attention_kernels.attend_packed(
        qkv.reshape(images, tokens, 3 * attention.heads, -1),
        padding=attention.padding,
        interpret=make_interpreter() if kernels.are_interpreted else None,
    )
    return _multiply(y.reshape(x.shape), attention.project), bias


def attend(kernels: Kernels, attention: Attention, copies: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the same by cuDNN's kernel; the normalized tokens are given for queries, keys and values."""
    images, tokens, width = copies[0].shape
    dtype, shape = copies[0].dtype, (images, tokens, attention.heads, width // attention.heads)
    weights = jnp.split(attention.qkv.kernel[...].astype(dtype), 3, axis=1)
    query_bias, bias = _split_biases(attention)
    # Behind a barrier, or XLA would make one product of several, and then copies of its parts.
    q, k, v = (x @ kernel for x, kernel in zip(lax.optimization_barrier(copies), weights, strict=True))
    q, k, v = (array.reshape(shape) for array in (add_bias(kernels, q, query_bias), k, v))
    y = attend_fused(q, k, v, attention.padding).reshape(images, tokens, width)
    return _multiply(y, attention.project), bias


def _split_biases(attention: Attention) -> tuple[jax.Array, jax.Array]:
    """Return the bias of queries, and one that is added to the result of the last product.

    The bias of keys adds the same to all scores of a query, and so changes nothing. The weights of values have a sum of
    1, so that their bias may as well be added after attention, and by the last product becomes one of its own.
    """
    query_bias, _, value_bias = jnp.split(attention.qkv.bias[...], 3)  # type: ignore[index]
    project = attention.project
    return query_bias, project.bias[...] + value_bias @ project.kernel[...]  # type: ignore[index]


def _multiply(x: jax.Array, layer: nnx.Linear) -> jax.Array:
    """Return what a dense layer does, without its bias."""
    return x @ layer.kernel[...].astype(x.dtype)


def _add_branch(x: jax.Array, y: jax.Array, bias: jax.Array, drop_path: Any) -> Tokens:
    """Return x plus a branch and its bias, which is added at once if the branch may be dropped."""
    dropped = drop_path(y + bias.astype(y.dtype)) if drop_path.rate else None
    return Tokens(x, y, bias) if dropped is None else Tokens(x, dropped)
