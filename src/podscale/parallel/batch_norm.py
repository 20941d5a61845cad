"""Distributed batch normalization: statistics over groups of `span` images, wherever their devices are.

The batch norm of the paper (arXiv 1811.06992) averages over a chosen set of replicas, so that the batch per replica can
shrink without hurting accuracy. Here the group is a property of the recipe: positions g·span .. (g+1)·span-1 of the
global batch. A device that holds several groups normalizes them side by side; a group that spans a tile of devices is
summed over the tile's mesh axes, one message per layer forward and one backward.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from podscale.errors import UserError

SCOPE = "batch_norm"  # what a profile of the compiled step finds its work by


@dataclass(frozen=True)
class Groups:
    """How a device's images fall into batch-norm groups.

    `images` of each group are on this device (0: all of them); the rest are on the devices along `axes`. Those along
    `inner` ones of these axes are summed over first, where that makes the message to the others cheaper.
    """

    images: int = 0
    axes: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()


class Moments(nnx.Variable):
    """Means and variances that a training call saw, averaged over this device's groups: [2, channels]."""


class BatchNorm(nnx.Module):
    """Normalizes over (group, height, width) per channel; statistics and parameters are float32 or wider.

    In training mode each call leaves its `Moments` behind; the train step averages them over the pod and moves the
    running statistics once per update, so that all replicas always hold the same state.
    """

    def __init__(
        self,
        features: int,
        *,
        zero_scale: bool = False,
        scaled: bool = True,
        epsilon: float = 1e-5,
        param_dtype: Any = jnp.float32,
    ) -> None:
        """Without `scaled` there is no scale to learn: it is 1."""
        self.scale = nnx.Param((jnp.zeros if zero_scale else jnp.ones)(features, param_dtype)) if scaled else None
        self.bias = nnx.Param(jnp.zeros(features, param_dtype))
        self.mean = nnx.BatchStat(jnp.zeros(features, param_dtype))
        self.var = nnx.BatchStat(jnp.ones(features, param_dtype))
        self.epsilon = epsilon
        self.groups = Groups()
        self.use_running_average = True

    def __call__(self, x: jax.Array, use_running_average: bool | None = None) -> jax.Array:
        scale = self._scale()
        if self.use_running_average if use_running_average is None else use_running_average:
            return _affine(x, self.mean[...], lax.rsqrt(self.var[...] + self.epsilon), scale, self.bias[...])
        if hasattr(self, "moments"):
            raise UserError("a batch norm is used twice in one pass of the model; give each place one of its own")
        y, moments = normalize(x, scale, self.bias[...], self.groups, self.epsilon)
        self.moments = Moments(moments)
        return y

    def affine(self, sums: jax.Array | None, rows: int) -> tuple[jax.Array, jax.Array]:
        """The same as a factor and an offset for each group and channel: [groups, channels] each.

        `sums` are those of the values and of their squares, over this device's `rows` values of each group; by autodiff
        they get the gradient, in one message. None: the running statistics are used, for whatever groups there are.
        """
        if sums is None:
            mean, var = self.mean[...][None], self.var[...][None]
        else:
            mean, mean_square = over_tile(sums, self.groups) / (rows * _devices(self.groups))
            var = jnp.maximum(mean_square - mean * mean, 0)
            self.moments = Moments(jnp.stack([mean, var]).mean(axis=1))
        factor = self._scale() * lax.rsqrt(var + self.epsilon)
        return factor, self.bias[...] - mean * factor

    def _scale(self) -> jax.Array:
        return jnp.ones_like(self.bias[...]) if self.scale is None else self.scale[...]


def running_update(stats: Any, moments: Any, momentum: float) -> Any:
    """Running statistics moved towards the pod's mean moments, as pure nested dicts ({..., "mean", "var"})."""
    if "moments" in moments:
        mean, var = moments["moments"]
        seen = {"mean": mean, "var": var}
        return {k: momentum * stats[k] + (1 - momentum) * seen[k] for k in stats}
    # A batch norm that the model never used saw nothing and stays as it is.
    return {k: running_update(stats[k], moments[k], momentum) if k in moments else stats[k] for k in stats}


# --- the function ------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalize(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    groups: Groups = Groups(),
    epsilon: float = 1e-5,
) -> tuple[jax.Array, jax.Array]:
    """Batch norm of x [images, ..., channels] within groups; also the mean over local groups of (mean, variance).

    The gradient is written out because it sums over devices: both directions then cost exactly one message, and
    nothing depends on how a collective is transposed. The moments carry no gradient.
    """
    return _forward(x, scale, bias, groups, epsilon)[0]


@jax.named_scope(SCOPE)
def _forward(x: jax.Array, scale: jax.Array, bias: jax.Array, groups: Groups, epsilon: float) -> Any:
    grouped = _grouped(x, groups)
    wide = grouped.astype(scale.dtype)
    sums = jnp.stack([_group_sum(wide), _group_sum(wide * wide)])
    mean, mean_square = over_tile(sums, groups) / _count(grouped, groups)
    var = jnp.maximum(mean_square - mean * mean, 0)
    inverse = lax.rsqrt(var + epsilon)
    y = _affine(grouped, mean, inverse, scale, bias).reshape(x.shape)
    moments = jnp.stack([mean, var]).mean(axis=1).reshape(2, -1)
    return (y, moments), (x, scale, mean, inverse)


@jax.named_scope(SCOPE)
def _backward(groups: Groups, epsilon: float, saved: Any, cotangents: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, scale, mean, inverse = saved
    grouped = _grouped(x, groups)
    dy = _grouped(cotangents[0], groups).astype(scale.dtype)
    normal = (grouped.astype(scale.dtype) - mean) * inverse
    local = jnp.stack([_group_sum(dy), _group_sum(dy * normal)])
    mean_dy, mean_dy_normal = over_tile(local, groups) / _count(grouped, groups)
    dx = (scale * inverse) * (dy - mean_dy - normal * mean_dy_normal)
    dbias, dscale = local.sum(axis=1).reshape(2, -1)  # this device's own share: gradient summation adds the others'
    return dx.reshape(x.shape).astype(x.dtype), dscale, dbias


normalize.defvjp(_forward, _backward)


@jax.named_scope(SCOPE)
def _affine(x: jax.Array, mean: jax.Array, inverse: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return ((x.astype(scale.dtype) - mean) * (inverse * scale) + bias).astype(x.dtype)


def _grouped(x: jax.Array, groups: Groups) -> jax.Array:
    """[images, ..., channels] -> [groups, images of a group, places, channels]"""
    images = groups.images or x.shape[0]
    return x.reshape(x.shape[0] // images, images, -1, x.shape[-1])


def _group_sum(values: jax.Array) -> jax.Array:
    """[groups, images, places, channels] -> [groups, 1, 1, channels]

    Image by image first; on a GPU all at once is neither faster nor slower (docs/results.md).
    """
    return values.sum(axis=2, keepdims=True).sum(axis=1, keepdims=True)


def _count(grouped: jax.Array, groups: Groups) -> int:
    """Values that each of a group's statistics is made of."""
    return grouped.shape[1] * grouped.shape[2] * _devices(groups)


def _devices(groups: Groups) -> int:
    """Over which a group is spread."""
    return math.prod(lax.axis_size(axis) for axis in groups.axes)


def over_tile(sums: jax.Array, groups: Groups) -> jax.Array:
    """The sum over all devices that a group is spread over."""
    outer = tuple(axis for axis in groups.axes if axis not in groups.inner)
    for axes in (groups.inner, outer):
        sums = lax.psum(sums, axes) if axes else sums
    return sums


# --- models of the user's own ------------------------------------------------------------------------------------


def distribute(model: nnx.Module) -> nnx.Module:
    """Replaces every flax `nnx.BatchNorm` in `model` by the distributed one, weights and statistics kept, in place."""
    ours: dict[int, BatchNorm] = {}  # one that stands under two names stays one
    for _, module in list(nnx.iter_modules(model)):
        for name, child in list(vars(module).items()):
            if isinstance(child, nnx.BatchNorm):
                setattr(module, name, ours.setdefault(id(child), _converted(child)))
    return model


def _converted(flax_norm: nnx.BatchNorm) -> BatchNorm:
    if flax_norm.scale is None or flax_norm.bias is None or flax_norm.axis not in (-1, (-1,)):
        raise UserError("a model's nnx.BatchNorm must have a scale and a bias and normalize its last axis")
    ours = BatchNorm(flax_norm.num_features, epsilon=flax_norm.epsilon)
    for name in ("scale", "bias", "mean", "var"):
        getattr(ours, name)[...] = getattr(flax_norm, name)[...]
    return ours
