"""Vision Transformer (Dosovitskiy et al. 2020, arXiv 2010.11929, section 3.1).

An image is cut into patches; each becomes a token, which gets its position added. Blocks of attention and of an MLP
with four times the width follow, each normalized before and added to its input (equations 2 and 3). A class token, or
the mean over all patches, becomes the logits.

The mean over patches and fixed sine-cosine positions are those of "Better plain ViT baselines for ImageNet-1k" (Beyer
et al. 2022, arXiv 2205.01580), and so is the random initialization: Xavier's for dense layers, zeros for the head.

The layers are in one list, in the order of the forward pass, as in `resnet`: embedding, blocks, norm, head.
"""

import math
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from podscale import recipe
from podscale.config.suggestions import suggest_numbers
from podscale.errors import UserError
from podscale.kernels.layer_spec import CUDNN, Kernels
from podscale.models.initializers import normal, xavier_uniform
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

MLP_RATIO = 4
PADDED_MULTIPLE = 8  # of tokens, for cuDNN: JAX refuses an odd number, and products are faster on multiples of 8
TEMPERATURE = 10_000  # ratio of the longest to the shortest wavelength of sine-cosine positions


class Size(NamedTuple):
    """Sizes of a Vision Transformer (table 1 of the paper; Ti and S: Touvron et al., arXiv 2012.12877, table 1)."""

    width: int
    depth: int
    heads: int


SIZES = MappingProxyType({"vit_tiny": Size(192, 12, 3), "vit_small": Size(384, 12, 6), "vit_base": Size(768, 12, 12)})


# --- tokens --------------------------------------------------------------------------------------------------------


class Embedding(nnx.Module):
    """Patches as tokens [images, tokens, width], with positions added; the class token, if there is one, comes first.

    Args:
        config: says side of a patch, pooling and kind of positions.
        width: of a token.
        grid: patches along a side of the image.
    """

    def __init__(self, config: recipe.Model, width: int, grid: int, types: Types, rngs: nnx.Rngs) -> None:
        lecun = normal(1 / math.sqrt(3 * config.patch**2))
        has_token = config.pooling == "token"
        self.grid, self.padding = grid, 0
        self.patches = PatchConv(3, width, config.patch, lecun, types, rngs)
        self.class_token = nnx.Param(fill(width, 0, types.param)) if has_token else None
        shape = (grid * grid + has_token, width)
        is_learned = config.positions == "learned"
        self.positions = nnx.Param(normal(0.02)(rngs.params(), shape, types.param)) if is_learned else None

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        if self.class_token is not None:
            token = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
            x = jnp.concatenate([token, x], axis=1)
        x = x + self.get_positions(x.shape[-1]).astype(x.dtype)
        return jnp.pad(x, ((0, 0), (0, self.padding), (0, 0))) if self.padding else x

    def count_tokens(self) -> int:
        """Return the number of tokens of an image, without padding."""
        return self.grid**2 + (self.class_token is not None)

    def get_positions(self, width: int) -> jax.Array | NDArray[np.float64]:
        """Return the positions of all tokens, [tokens, width]; a class token has none of the fixed ones."""
        if self.positions is not None:
            return self.positions[...]
        fixed = make_sincos_positions(self.grid, width)
        return fixed if self.class_token is None else np.concatenate([np.zeros((1, width)), fixed])


def make_sincos_positions(grid: int, width: int) -> NDArray[np.float64]:
    """Return sines and cosines of the column and of the row of each patch, [grid², width].

    A quarter of the width each: sines and cosines of the column, then of the row, with wavelengths in a geometric
    series from 2π to 2π·TEMPERATURE.
    """
    frequencies = TEMPERATURE ** -(np.arange(width // 4) / (width // 4 - 1))
    rows, columns = np.divmod(np.arange(grid * grid), grid)
    angles = [place[:, None] * frequencies for place in (columns, rows)]
    return np.concatenate([function(angle) for angle in angles for function in (np.sin, np.cos)], axis=1)


def resample_positions(positions: jax.Array | NDArray, tokens: int) -> jax.Array:
    """Return learned positions for another number of tokens, by bicubic interpolation of the grid of patches.

    Args:
        positions: [tokens, width]; of a class token, if there is one, and of a square of patches.
        tokens: of the new image size, with as many class tokens.
    """
    old_grid, new_grid = (math.isqrt(count) for count in (len(positions), tokens))
    extra = len(positions) - old_grid**2
    patches = jnp.asarray(positions[extra:]).reshape(old_grid, old_grid, -1)
    resized = jax.image.resize(patches, (new_grid, new_grid, patches.shape[-1]), "cubic", antialias=True)
    return jnp.concatenate([jnp.asarray(positions[:extra]), resized.reshape(new_grid**2, -1)])


def adapt_positions(model: "VisionTransformer", tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return weights by our names with their learned positions resampled, if they are for images of another size."""
    name, positions = "layers.0.positions", getattr(model.layers[0], "positions", None)
    if positions is None or name not in tensors:
        return tensors
    old, tokens = tensors[name], positions.shape[0]
    has_token = [count - math.isqrt(count) ** 2 for count in (len(old), tokens)]
    if old.shape == positions.shape or old.shape[1:] != positions.shape[1:] or has_token[0] != has_token[1]:
        return tensors
    return tensors | {name: np.asarray(resample_positions(old, tokens))}


# --- blocks --------------------------------------------------------------------------------------------------------


class Attention(nnx.Module):
    """Multi-head self-attention over tokens [images, tokens, width].

    `kernels` says who computes it: `CUDNN`, a fused kernel on GPUs for bfloat16; or else `attend`, the reference. The
    last `padding` tokens are there for the kernel alone.
    """

    def __init__(self, width: int, heads: int, types: Types, rngs: nnx.Rngs) -> None:
        self.heads: int = heads
        self.kernels: Kernels | None = None
        self.padding: int = 0
        self.qkv = make_linear(width, 3 * width, xavier_uniform(width, width), types, rngs)
        self.project = make_linear(width, width, xavier_uniform(width, width), types, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        images, tokens, width = x.shape
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(images, tokens, 3, self.heads, width // self.heads), 2, 0)
        y = attend_fused(q, k, v, self.padding) if self.kernels == CUDNN else attend(q, k, v)
        return self.project(y.reshape(x.shape))


def attend_fused(q: jax.Array, k: jax.Array, v: jax.Array, padding: int) -> jax.Array:
    """Return what `attend` does, by one kernel of cuDNN's, in bfloat16.

    The last `padding` tokens are not attended to. They attend to the others like any token, so that they stay finite.
    """
    lengths = jnp.full(len(q), q.shape[1] - padding, jnp.int32) if padding else None
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return softmax(q kᵀ / √d) v for each image and head, with weights in at least float32.

    The reference implementation of cuDNN's kernel; unlike JAX's own it keeps float64.

    Args:
        q: queries, [images, tokens, heads, d].
        k: keys, the same.
        v: values, the same.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("ithd,ishd->ihts", q, k, preferred_element_type=wide) / math.sqrt(q.shape[-1])
    return jnp.einsum("ihts,ishd->ithd", jax.nn.softmax(scores).astype(v.dtype), v)


class MLP(nnx.Module):
    """Two dense layers with GELU between them."""

    def __init__(self, width: int, types: Types, rngs: nnx.Rngs) -> None:
        hidden = MLP_RATIO * width
        self.expand = make_linear(width, hidden, xavier_uniform(width, hidden), types, rngs)
        self.project = make_linear(hidden, width, xavier_uniform(hidden, width), types, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.project(gelu(self.expand(x)))


class Block(nnx.Module):
    """Attention, then the MLP, each normalized before and added to its input."""

    def __init__(self, size: Size, drop_path: float, types: Types, rngs: nnx.Rngs) -> None:
        self.norm1 = make_layer_norm(size.width, types, rngs)
        self.attention = Attention(size.width, size.heads, types, rngs)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = make_layer_norm(size.width, types, rngs)
        self.mlp = MLP(size.width, types, rngs)
        self.drop_path2 = DropPath(drop_path)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.drop_path1(self.attention(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


# --- the network ---------------------------------------------------------------------------------------------------


class VisionTransformer(nnx.Module):
    """Maps normalized images [images, height, width, 3] to logits [images, classes], float32 (float64 for float64)."""

    def __init__(self, size: Size, config: recipe.Model, classes: int, image_size: int, rngs: nnx.Rngs) -> None:
        types = select_types(config.precision)
        self.has_token, self.remat, self.dtype = config.pooling == "token", config.remat, types.compute
        embedding = Embedding(config, size.width, image_size // config.patch, types, rngs)
        blocks = [Block(size, rate, types, rngs) for rate in spread_rates(config.drop_path, size.depth)]
        norm = make_layer_norm(size.width, types, rngs)
        head = DenseHead(size.width, classes, nnx.initializers.zeros_init(), types, rngs)
        self.layers, self.dropout = nnx.List([embedding, *blocks, norm, head]), Dropout(config.dropout)

    def __call__(self, images: jax.Array) -> jax.Array:
        *layers, norm, head = list[Any](self.layers)
        x = apply_layers(layers, images, self.remat)
        x = norm(x[:, :1] if self.has_token else x[:, : layers[0].count_tokens()])
        return head(self.dropout(x.mean(axis=1, dtype=head.kernel.dtype)))

    def use_kernels(self, kernels: Kernels) -> None:
        """Let `kernels` compute what they can of the modules: attention in bfloat16, by cuDNN."""
        embedding: Any = self.layers[0]
        if (kernels == CUDNN or kernels.are_pallas) and self.dtype == jnp.bfloat16:
            embedding.padding = -embedding.count_tokens() % PADDED_MULTIPLE
            self.set_attributes(Attention, kernels=CUDNN, padding=embedding.padding)


def build_vit(name: str, config: recipe.Model, classes: int, image_size: int, rngs: nnx.Rngs) -> VisionTransformer:
    """Return the Vision Transformer of that name in `SIZES`.

    Raises:
        UserError: patches do not divide images of that size.
    """
    if image_size % config.patch:
        multiples = range(config.patch, image_size + 2 * config.patch, config.patch)
        nearest = suggest_numbers(image_size, multiples)
        raise UserError(f"model.patch {config.patch} does not divide data.image_size {image_size}; {nearest}")
    return VisionTransformer(SIZES[name], config, classes, image_size, rngs)
