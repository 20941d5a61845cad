"""A ResNet for evaluation with its batch norms folded into its convolutions: the same function, in fewer passes.

With running statistics, a batch norm is a factor and an offset for every channel. The factor goes into the
convolution's kernel, in the parameters' precision. Offset, shortcut and ReLU directly follow the convolution, where XLA
finds them and lets cuDNN compute all of it in one kernel.
"""

from typing import Any

import jax
from flax import nnx

from podscale.models.resnet import Conv, ResNet, list_convolutions, max_pool
from podscale.parallel.batch_norm import BatchNorm


def forward(net: ResNet, images: jax.Array) -> jax.Array:
    """Return the same logits as `net(images)`. This overwrites the kernels of `net`."""
    stem, *blocks, head = list[Any](net.layers)
    x = nnx.relu(_convolve(stem.conv, stem.norm, images.astype(net.dtype)))
    x = x if stem.small else max_pool(x)
    for block in blocks:
        x = _apply_block(block, x)
    return head(x)


def _apply_block(block: Any, x: jax.Array) -> jax.Array:
    shortcut = x if block.shortcut is None else _convolve(block.shortcut.conv, block.shortcut.norm, x)
    *before, last = list_convolutions(block)
    for conv, norm in before:
        x = nnx.relu(_convolve(conv, norm, x))
    return nnx.relu(_convolve(*last, x) + shortcut)


def _convolve(conv: Conv, norm: BatchNorm, x: jax.Array) -> jax.Array:
    """Return the normalized convolution of x."""
    factor, offset = norm.compute_affine(None, 0)
    conv.kernel[...] = conv.kernel[...] * factor[0]
    return conv(x) + offset[0].astype(x.dtype)
