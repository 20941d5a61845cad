"""A Vision Transformer in fewer passes over memory: the same function as `vit.VisionTransformer`, by its parameters.

A block's sum is made where it is normalized, and with it the bias of the layer before is added
(`kernels/layer_norm.py`); the MLP's first bias is added where GELU is (`kernels/gelu.py`). Attention is cuDNN's
kernel on tokens that are padded to a multiple of 8. Queries, keys and values come from a product each: cuDNN takes them
as three arrays, and the result of one product would have to be copied into three.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

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
    x, *copies = tokens.normalize(kernels, block.norm1, copies=3)
    tokens = _add_branch(x, *attend(kernels, block.attention, copies), block.drop_path1)
    x, h = tokens.normalize(kernels, block.norm2)
    expand, project = block.mlp.expand, block.mlp.project
    hidden = add_bias_and_gelu(kernels, _multiply(h, expand), expand.bias[...])  # type: ignore[index]
    return _add_branch(x, _multiply(hidden, project), project.bias[...], block.drop_path2)  # type: ignore[index]


def attend(kernels: Kernels, attention: Attention, copies: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the attention of normalized tokens, given for queries, keys and values, and a bias that is to be added.

    The bias of keys adds the same to all scores of a query, and so changes nothing. The weights of values have a sum of
    1, so that their bias may as well be added after attention, and by the last product becomes one of its own.
    """
    images, tokens, width = copies[0].shape
    dtype, shape = copies[0].dtype, (images, tokens, attention.heads, width // attention.heads)
    weights = jnp.split(attention.qkv.kernel[...].astype(dtype), 3, axis=1)
    query_bias, _, value_bias = jnp.split(attention.qkv.bias[...], 3)  # type: ignore[index]
    # Behind a barrier, or XLA would make one product of several, and then copies of its parts.
    q, k, v = (x @ kernel for x, kernel in zip(lax.optimization_barrier(copies), weights, strict=True))
    q, k, v = (array.reshape(shape) for array in (add_bias(kernels, q, query_bias), k, v))
    y = attend_fused(q, k, v, attention.padding).reshape(images, tokens, width)
    project = attention.project
    bias = project.bias[...] + value_bias @ project.kernel[...]  # type: ignore[index]
    return _multiply(y, project), bias


def _multiply(x: jax.Array, layer: nnx.Linear) -> jax.Array:
    """Return what a dense layer does, without its bias."""
    return x @ layer.kernel[...].astype(x.dtype)


def _add_branch(x: jax.Array, y: jax.Array, bias: jax.Array, drop_path: Any) -> Tokens:
    """Return x plus a branch and its bias, which is added at once if the branch may be dropped."""
    dropped = drop_path(y + bias.astype(y.dtype)) if drop_path.rate else None
    return Tokens(x, y, bias) if dropped is None else Tokens(x, dropped)
