"""A ConvNeXt in fewer passes over memory: the same function as `convnext.ConvNeXt`, by its parameters.

Layer norm, GELU with the bias before it, and the sums for the gradients of other biases are Pallas kernels
(`kernels/layer_norm.py`, `gelu.py`, `bias.py`). The scale of a block's output is multiplied into the weights and the
bias of its last product, so that it takes no pass, and neither does its gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from podscale.kernels.bias import add_bias
from podscale.kernels.gelu import add_bias_and_gelu
from podscale.kernels.layer_norm import add_and_normalize
from podscale.kernels.layer_spec import Kernels
from podscale.models.convnext import Block, ConvNeXt, Downsample, Stem


def can_fuse(model: Any, kernels: Kernels | None) -> bool:
    """Return whether a model is a ConvNeXt of bfloat16, and `kernels` are for it."""
    return bool(kernels and kernels.are_pallas) and type(model) is ConvNeXt and model.dtype == jnp.bfloat16


def forward(net: ConvNeXt, images: jax.Array, kernels: Kernels) -> jax.Array:
    """Return the same logits as `net(images)`."""
    *layers, norm, head = list[Any](net.layers)
    x = images
    for layer in layers:
        apply = nnx.remat(apply_layer, static_argnums=0) if net.remat else apply_layer
        x = apply(kernels, layer, x)
    return head(net.dropout(norm(x.mean(axis=(1, 2), dtype=head.kernel.dtype))))


def apply_layer(kernels: Kernels, layer: Any, x: jax.Array) -> jax.Array:
    """Return the output of a stem, a block, or what is between stages."""
    if isinstance(layer, Stem):
        return normalize(kernels, layer.norm, layer.conv(x))
    if isinstance(layer, Downsample):
        return layer.conv(normalize(kernels, layer.norm, x))
    return apply_block(kernels, layer, x)


def apply_block(kernels: Kernels, block: Block, x: jax.Array) -> jax.Array:
    """Return the output of a block."""
    y = add_bias(kernels, filter_channels(block.depthwise, x), block.depthwise.bias[...])  # type: ignore[index]
    h = normalize(kernels, block.norm, y)
    expand, project, scale = block.expand, block.project, block.layer_scale[...]
    z = h @ expand.kernel[...].astype(h.dtype)
    hidden = add_bias_and_gelu(kernels, z, expand.bias[...])  # type: ignore[index]
    out = hidden @ (project.kernel[...] * scale).astype(h.dtype)
    return x + block.drop_path(add_bias(kernels, out, project.bias[...] * scale))  # type: ignore[index]


def filter_channels(layer: nnx.Conv, x: jax.Array) -> jax.Array:
    """Return what a depthwise convolution does, without its bias."""
    return lax.conv_general_dilated(
        x,
        layer.kernel[...].astype(x.dtype),
        (1, 1),
        "SAME",
        feature_group_count=x.shape[-1],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def normalize(kernels: Kernels, norm: nnx.LayerNorm, x: jax.Array) -> jax.Array:
    """Return the layer norm of x."""
    parameters = norm.scale[...], norm.bias[...]  # type: ignore[index]
    return add_and_normalize(kernels, x, None, None, parameters, norm.epsilon)[1]
