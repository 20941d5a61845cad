"""A ResNet as a chain of fused layers: the same function as `resnet.ResNet`, from the same parameters.

Each convolution takes the raw output of the previous one together with what normalizes it (`kernels/fused.py`). A block
thus ends in the first convolution of the next one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podscale.kernels import fused, pool
from podscale.kernels.fused import RawOutput
from podscale.kernels.layer_spec import Affine, FactorAndOffset, Kernels, LayerSpec, SumAndSquareSum
from podscale.models.max_pool import max_pool
from podscale.models.resnet import Conv, ResNet, Stem, convolve_four_outputs, list_convolutions
from podscale.parallel.batch_norm import BatchNorm


def forward(net: ResNet, images: jax.Array, kernels: Kernels) -> jax.Array:
    """Return the same logits as `net(images)`; `kernels` says who computes the layers (`kernels/layer_spec.py`)."""
    stem, *blocks, head = list[Any](net.layers)
    chain = FusedChain(images.shape[0], stem.norm.groups.images, kernels)
    pending = Pending(chain.apply_stem(stem, images.astype(net.dtype)))
    for block in blocks:
        pending = chain.apply_block(block, pending)
    assert isinstance(pending.x, RawOutput)  # there is at least one block
    return head(fused.activate(chain.make_spec(), *pending))  # type: ignore[arg-type]


class Pending(NamedTuple):
    """What is still to be normalized, added and rectified, in the order of arguments of `fused.apply_layer`."""

    x: RawOutput | jax.Array
    affine: Affine = ()
    shortcut: RawOutput | jax.Array | None = None
    shortcut_affine: Affine = ()


class FusedChain:
    """The layers of a network for one forward pass.

    Args:
        images: images of this device.
        group_images: images of each batch-norm group that are on this device; 0: all of them.
        kernels: who computes the layers.
    """

    def __init__(self, images: int, group_images: int, kernels: Kernels) -> None:
        self.groups, self.kernels = images // (group_images or images), kernels

    def apply_stem(self, stem: Stem, images: jax.Array) -> jax.Array:
        """Return the stem's output, [images, height, width, channels]."""
        spec = self.make_spec(output_sums=not stem.norm.use_running_average)
        if not stem.small and images.shape[1] % 4 == images.shape[2] % 4 == 0:
            z = convolve_four_outputs(images, stem.conv.kernel[...])
            raw, windows = pool.make_raw_blocks(spec, z)
            return pool.normalize_and_pool(spec, raw, windows, self.compute_affine(stem.norm, raw, pixels=4))
        raw = fused.make_raw_output(spec, stem.conv(images))
        x = fused.activate(spec, raw, self.compute_affine(stem.norm, raw))
        return x if stem.small else max_pool(x)

    def apply_block(self, block: Any, pending: Pending) -> Pending:
        """Return a block's last convolution and its shortcut, both still to be normalized and added."""
        block_input: jax.Array | None = None
        for conv, norm in list_convolutions(block):
            y, raw = self.convolve(
                conv, pending, keep_input=block_input is None, output_sums=not norm.use_running_average
            )
            block_input = y if block_input is None else block_input
            pending = Pending(raw, self.compute_affine(norm, raw))
        assert block_input is not None  # a block has convolutions
        if block.shortcut is None:
            return pending._replace(shortcut=block_input)
        norm = block.shortcut.norm
        _, raw = self.convolve(block.shortcut.conv, Pending(block_input), output_sums=not norm.use_running_average)
        return pending._replace(shortcut=raw, shortcut_affine=self.compute_affine(norm, raw))

    def convolve(
        self, conv: Conv, pending: Pending, *, keep_input: bool = False, output_sums: bool = True
    ) -> tuple[jax.Array, RawOutput]:
        """Return the rectified input and its raw convolution."""
        kernel = conv.kernel[...]
        spec = self.make_spec(
            stride=conv.stride, padding=kernel.shape[0] // 2, output_sums=output_sums, keep_input=keep_input
        )
        return fused.apply_layer(spec, *pending, kernel)

    def make_spec(self, **fields: Any) -> LayerSpec:
        """Return a layer with the groups and kernels of this chain."""
        return LayerSpec(groups=self.groups, kernels=self.kernels, **fields)

    def compute_affine(self, norm: BatchNorm, raw: RawOutput, pixels: int = 1) -> FactorAndOffset:
        """Return the factor and offset that normalize a raw output whose channels hold this many pixels."""
        channels = raw.values.shape[-1] // pixels
        rows = raw.values.size // (channels * self.groups)
        factor, offset = norm.compute_affine(raw.sums and self._add_pixels(raw.sums, channels), rows)
        shape = (self.groups, factor.shape[-1])
        return jnp.broadcast_to(factor, shape), jnp.broadcast_to(offset, shape)

    def _add_pixels(self, sums: SumAndSquareSum, channels: int) -> SumAndSquareSum:
        by_channel, squares = (values.reshape(self.groups, -1, channels).sum(1) for values in sums)
        return by_channel, squares
