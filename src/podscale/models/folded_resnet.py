"""A ResNet for evaluation, its batch norms folded into its convolutions: the same function, in fewer passes.

By running statistics a batch norm is a factor and an offset for every channel. The factor goes into the convolution's
kernel, in the parameters' precision; offset, shortcut and ReLU are left to follow the convolution at once, where XLA
finds them and has cuDNN compute all of it in one kernel.
"""

from typing import Any

import jax
from flax import nnx

from podscale.models.resnet import Conv, ResNet, convolutions, max_pool
from podscale.parallel.batch_norm import BatchNorm


def forward(net: ResNet, images: jax.Array) -> jax.Array:
    """Logits, as `net(images)` has them; the kernels of `net` are no longer what they were."""
    stem, *blocks, head = list[Any](net.layers)
    x = nnx.relu(_convolved(stem.conv, stem.norm, images.astype(net.dtype)))
    x = x if stem.small else max_pool(x)
    for block in blocks:
        x = _block(block, x)
    return head(x)


def _block(block: Any, x: jax.Array) -> jax.Array:
    rest = x if block.shortcut is None else _convolved(block.shortcut.conv, block.shortcut.norm, x)
    *before, last = convolutions(block)
    for conv, norm in before:
        x = nnx.relu(_convolved(conv, norm, x))
    return nnx.relu(_convolved(*last, x) + rest)


def _convolved(conv: Conv, norm: BatchNorm, x: jax.Array) -> jax.Array:
    factor, offset = norm.affine(None, 0)
    conv.kernel[...] = conv.kernel[...] * factor[0]
    return conv(x) + offset[0].astype(x.dtype)
