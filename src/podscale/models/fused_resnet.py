"""A ResNet as a chain of fused layers: the same function as `resnet`'s, from the same parameters.

Each convolution takes the raw output of the one before it, with what normalizes it (`kernels/fused.py`). A block thus
ends in the first convolution of the next one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podscale.kernels import fused, pool
from podscale.kernels.fused import Affine, Raw
from podscale.kernels.shape import Shape
from podscale.models.resnet import Conv, ResNet, Stem, convolutions, convolve_in_fours, max_pool
from podscale.parallel.batch_norm import BatchNorm


class Pending(NamedTuple):
    """What is still to be normalized, added and rectified, as `fused.layer` takes it."""

    x: Raw | jax.Array
    affine: Affine = ()
    rest: Raw | jax.Array | None = None
    rest_affine: Affine = ()


class Chain:
    """The layers of a network, for one call."""

    def __init__(self, images: int, held: int, kernels: str) -> None:
        self.groups, self.kernels = images // (held or images), kernels

    def convolved(self, conv: Conv, pending: Pending, *, keeps: bool = False, counts: bool = True) -> tuple[Any, Raw]:
        kernel = conv.kernel[...]
        shape = Shape(self.groups, conv.stride, kernel.shape[0] // 2, counts, keeps, self.kernels)
        return fused.layer(shape, *pending, kernel)

    def normalized(self, norm: BatchNorm, raw: Raw, in_fours: bool = False) -> Affine:
        """What normalizes a raw output, whose channels may stand there for four pixels."""
        channels = raw.values.shape[-1] // (4 if in_fours else 1)
        rows = raw.values.size // (channels * self.groups)
        sums = raw.sums if raw.sums is None else raw.sums.reshape(2, self.groups, -1, channels).sum(2)
        factor, offset = norm.affine(sums, rows)
        shape = (self.groups, factor.shape[-1])
        return jnp.broadcast_to(factor, shape), jnp.broadcast_to(offset, shape)

    def stem(self, stem: Stem, images: jax.Array) -> jax.Array:
        counts = not stem.norm.use_running_average
        if not stem.small and images.shape[1] % 4 == images.shape[2] % 4 == 0:
            raw = fused.raw(self.groups, convolve_in_fours(images, stem.conv.kernel[...]), counts=counts)
            return pool.pooled(self.groups, raw, self.normalized(stem.norm, raw, in_fours=True))
        raw = fused.raw(self.groups, stem.conv(images), counts=counts)
        x = fused.activation(self.groups, raw, self.normalized(stem.norm, raw))
        return x if stem.small else max_pool(x)

    def block(self, block: Any, pending: Pending) -> Pending:
        beside: Any = None
        for conv, norm in convolutions(block):
            y, raw = self.convolved(conv, pending, keeps=beside is None, counts=not norm.use_running_average)
            beside = y if beside is None else beside
            pending = Pending(raw, self.normalized(norm, raw))
        if block.shortcut is None:
            return pending._replace(rest=beside)
        norm = block.shortcut.norm
        _, raw = self.convolved(block.shortcut.conv, Pending(beside), counts=not norm.use_running_average)
        return pending._replace(rest=raw, rest_affine=self.normalized(norm, raw))


def forward(net: ResNet, images: jax.Array, kernels: str) -> jax.Array:
    """Logits, as `net(images)` has them."""
    stem, *blocks, head = list[Any](net.layers)
    chain = Chain(images.shape[0], stem.norm.groups.images, kernels)
    pending = Pending(chain.stem(stem, images.astype(net.dtype)))
    for block in blocks:
        pending = chain.block(block, pending)
    assert isinstance(pending.x, Raw)  # there is at least one block
    return head(fused.activation(chain.groups, *pending))  # type: ignore[arg-type]
