"""ConvNeXt (Liu et al. 2022, arXiv 2201.03545, figure 4 and table 9).

Four stages of blocks: a depthwise 7x7 convolution, layer norm, and an MLP over channels whose output is scaled per
channel before it is added. Between stages, and at the start, patches become places with more channels. All norms are
layer norms, so nothing depends on the batch.

The layers are in one list, in the order of the forward pass, as in `resnet`.
"""

from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from flax import nnx

from podscale import recipe
from podscale.config.suggestions import suggest_numbers
from podscale.errors import UserError
from podscale.models.initializers import normal
from podscale.models.layers import (
    DenseHead,
    PatchConv,
    Types,
    gelu,
    make_layer_norm,
    make_linear,
    select_types,
)
from podscale.models.random_layers import Dropout, DropPath, spread_rates
from podscale.models.remat import apply_layers
from podscale.parallel.placement import fill

REDUCTION = 32  # from the side of the image to that of the last map
MLP_RATIO = 4
LAYER_SCALE = 1e-6  # initial factor of a block's output
INIT = normal(0.02)


class Size(NamedTuple):
    """Blocks and channels of each stage."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]


SIZES = MappingProxyType(
    {
        "convnext_tiny": Size((3, 3, 9, 3), (96, 192, 384, 768)),
        "convnext_small": Size((3, 3, 27, 3), (96, 192, 384, 768)),
        "convnext_base": Size((3, 3, 27, 3), (128, 256, 512, 1024)),
    }
)


class Stem(nnx.Module):
    """Patches of 4x4 pixels as places, normalized."""

    def __init__(self, width: int, types: Types, rngs: nnx.Rngs) -> None:
        self.conv = PatchConv(3, width, 4, INIT, types, rngs)
        self.norm = make_layer_norm(width, types, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class Downsample(nnx.Module):
    """Between stages: 2x2 places, normalized, as one."""

    def __init__(self, inputs: int, outputs: int, types: Types, rngs: nnx.Rngs) -> None:
        self.norm = make_layer_norm(inputs, types, rngs)
        self.conv = PatchConv(inputs, outputs, 2, INIT, types, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(self.norm(x))


class Block(nnx.Module):
    """A depthwise 7x7 convolution and an MLP over channels, scaled and added to the input."""

    def __init__(self, width: int, drop_path: float, types: Types, rngs: nnx.Rngs) -> None:
        self.depthwise = nnx.Conv(
            width,
            width,
            (7, 7),
            feature_group_count=width,
            dtype=types.compute,
            param_dtype=types.param,
            kernel_init=INIT,
            rngs=rngs,
        )
        self.norm = make_layer_norm(width, types, rngs)
        self.expand = make_linear(width, MLP_RATIO * width, INIT, types, rngs)
        self.project = make_linear(MLP_RATIO * width, width, INIT, types, rngs)
        self.layer_scale = nnx.Param(fill(width, LAYER_SCALE, types.param))
        self.drop_path = DropPath(drop_path)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.depthwise(x))
        y = self.project(gelu(self.expand(y)))
        return x + self.drop_path(y * self.layer_scale[...].astype(x.dtype))


class ConvNeXt(nnx.Module):
    """Maps normalized images [images, height, width, 3] to logits [images, classes], float32 (float64 for float64)."""

    def __init__(self, size: Size, config: recipe.Model, classes: int, rngs: nnx.Rngs) -> None:
        types, rates = select_types(config.precision), iter(spread_rates(config.drop_path, sum(size.depths)))
        layers: list[nnx.Module] = [Stem(size.widths[0], types, rngs)]
        for stage, (depth, width) in enumerate(zip(size.depths, size.widths, strict=True)):
            if stage:
                layers.append(Downsample(size.widths[stage - 1], width, types, rngs))
            layers += [Block(width, next(rates), types, rngs) for _ in range(depth)]
        norm = make_layer_norm(size.widths[-1], types, rngs)
        self.dropout, self.remat, self.dtype = Dropout(config.dropout), config.remat, types.compute
        self.layers = nnx.List([*layers, norm, DenseHead(size.widths[-1], classes, INIT, types, rngs)])

    def __call__(self, images: jax.Array) -> jax.Array:
        *layers, norm, head = list[Any](self.layers)
        x = apply_layers(layers, images, self.remat)
        return head(self.dropout(norm(x.mean(axis=(1, 2), dtype=head.kernel.dtype))))


def build_convnext(name: str, config: recipe.Model, classes: int, image_size: int, rngs: nnx.Rngs) -> ConvNeXt:
    """Return the ConvNeXt of that name in `SIZES`.

    Raises:
        UserError: images of that size do not halve five times.
    """
    if image_size % REDUCTION:
        nearest = suggest_numbers(image_size, range(REDUCTION, image_size + 2 * REDUCTION, REDUCTION))
        raise UserError(
            f"data.image_size {image_size} does not fit {name}, which needs a multiple of {REDUCTION}; {nearest}"
        )
    return ConvNeXt(SIZES[name], config, classes, rngs)
