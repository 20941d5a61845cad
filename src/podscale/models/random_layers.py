"""Layers that do something random in training: dropout, stochastic depth, and what users derive from `RandomLayer`.

Their random numbers follow from the seed, the step, the position of an image in the global batch and the layer's place
in the model, never from a device or from a counter. So every pod drops the same, and a resumed run too. They are drawn
in float32 whatever the precision.
"""

import math
import zlib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from podscale.errors import UserError


class KeySource:
    """The keys of this device's images for one pass of the model: [images]; the layers of a module share it."""

    def __init__(self, keys: jax.Array) -> None:
        self.keys = keys


class RandomLayer(nnx.Module):
    """A layer that draws its random numbers from keys of images.

    A model's own layer derives from this and calls `get_keys` in its `__call__`. In evaluation, and where training
    passes no keys, it gets None and must do nothing random.

    Examples:
        >>> class Noise(RandomLayer):
        ...     def __call__(self, x):
        ...         keys = self.get_keys()
        ...         if keys is None:
        ...             return x
        ...         return x + jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
        >>> float(Noise()(jnp.ones((2, 3))).sum())
        6.0
    """

    def __init__(self) -> None:
        self.deterministic = True
        self.path = ""  # in the model
        self.source: KeySource | None = None

    def get_keys(self) -> jax.Array | None:
        """Return one random key for each image that differs from that of every other layer; None: do nothing random."""
        if self.deterministic or self.source is None:
            return None
        number = zlib.crc32(self.path.encode())
        return jax.vmap(jax.random.fold_in, in_axes=(0, None))(self.source.keys, number)


class Dropout(RandomLayer):
    """Sets a share of the values to 0 and scales the others up (Srivastava et al. 2014, JMLR 15).

    Args:
        rate: the share.
        broadcast_dims: axes along which one choice holds for all values; the first, of images, cannot be one.
    """

    def __init__(self, rate: float, broadcast_dims: tuple[int, ...] = ()) -> None:
        super().__init__()
        if 0 in broadcast_dims:
            raise UserError("dropout cannot make one choice for all images; leave axis 0 out of broadcast_dims")
        self.rate, self.broadcast_dims = rate, tuple(broadcast_dims)

    def __call__(self, x: jax.Array) -> jax.Array:
        shape = [1 if axis + 1 in self.broadcast_dims else side for axis, side in enumerate(x.shape[1:])]
        return drop(x, self.get_keys(), self.rate, tuple(shape))


class DropPath(RandomLayer):
    """Leaves out a branch of an image with probability `rate`, and scales it up otherwise (stochastic depth).

    Reference:
        Huang et al. 2016, arXiv 1603.09382.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def __call__(self, x: jax.Array) -> jax.Array:
        return drop(x, self.get_keys(), self.rate, (1,) * (x.ndim - 1))


def drop(x: jax.Array, keys: jax.Array | None, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """Return x with every choice set to 0 with probability `rate`, and else divided by 1 - rate.

    Args:
        x: [images, ...].
        keys: of the images; None: return x.
        rate: below 1; 0: return x.
        shape: of the choices for one image; an axis of length 1 is broadcast.
    """
    if keys is None or rate == 0:
        return x
    keep = 1 - rate
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (math.prod(shape),), jnp.float32))(keys)
    kept = uniform.reshape(x.shape[0], *shape) < keep
    return jnp.where(kept, x / jnp.asarray(keep, x.dtype), jnp.zeros((), x.dtype))


def spread_rates(rate: float, depth: int) -> list[float]:
    """Return rates of stochastic depth that grow linearly from 0 at the first block to `rate` at the last.

    >>> spread_rates(0.2, 3)
    [0.0, 0.1, 0.2]
    """
    return [rate * index / max(1, depth - 1) for index in range(depth)]


# --- models ----------------------------------------------------------------------------------------------------------


def name_random_layers(model: nnx.Module, join_path: Callable[[Iterable[object]], str]) -> bool:
    """Set the path of every random layer of a model; return whether it has any."""
    layers = [(path, module) for path, module in nnx.iter_modules(model) if isinstance(module, RandomLayer)]
    for path, module in layers:
        module.path = join_path(path)
    return bool(layers)


def replace_dropouts(model: nnx.Module) -> None:
    """Replace every flax `nnx.Dropout` in `model`, which counts its calls, by ours, in place."""
    replacements: dict[int, Dropout] = {}  # a module that is shared under two names stays one module
    for _, module in list(nnx.iter_modules(model)):
        for name, child in list(vars(module).items()):
            if isinstance(child, nnx.Dropout):
                ours = Dropout(float(child.rate), tuple(child.broadcast_dims))
                setattr(module, name, replacements.setdefault(id(child), ours))
