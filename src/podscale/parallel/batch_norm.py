"""Distributed batch normalization: statistics over groups of `span` images, on whichever devices these are.

Ying et al. (2018, arXiv 1811.06992) normalize over a chosen set of replicas, so that the batch per replica can shrink
without hurting accuracy. Here the group is a property of the recipe: positions g·span .. (g+1)·span-1 of the global
batch. A device that holds several groups normalizes them side by side; a group that spans a tile of devices is summed
over the tile's mesh axes, with one message per layer forward and one backward.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Inexact, PyTree

from podscale.errors import UserError
from podscale.parallel import sum_kernels
from podscale.parallel.placement import fill
from podscale.parallel.sum_kernels import SumKernels
from podscale.parallel.swing import sum_over_chips
from podscale.pod import CORE, TILE, Pod

SCOPE = "batch_norm"  # a profile of the compiled step finds batch norm by this name

Activation = sum_kernels.Activation
Values: TypeAlias = Float[Array, "images *places channels"]  # of one device's images
Statistic: TypeAlias = Float[Array, "channels"]
GroupedValues: TypeAlias = Float[Array, "groups group_images all_places channels"]
Affine: TypeAlias = Float[Array, "groups channels"]


@dataclass(frozen=True)
class Groups:
    """How a device's images form batch-norm groups.

    Attributes:
        images: images of each group that are on this device; 0: all of this device's images.
        axes: mesh axes along which the other images of a group are; empty: groups lie on one device.
        inner: those of `axes` that are summed over first, where that makes the message to the others cheaper.
        exchanges: whether chips exchange whole sums (`swing.py`) instead of leaving the sum to the compiler.
    """

    images: int = 0
    axes: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    exchanges: bool = False


def make_tiled_groups(pod: Pod, images: int, *, exchanges: bool = False) -> Groups:
    """Return batch-norm groups that span tiles, with `images` of each group on every device.

    One sum over the whole tile is one latency, and the better choice on TPUs
    (`tests/integration/test_tpu_program.py`). Between CPUs it is a ring over all devices of all processes, so the
    devices of each process are summed first; with `exchanges`, chips then send whole sums to each other.
    """
    inner = (CORE,) if pod.kind == "cpu" and pod.hosts > 1 and pod.cores > 1 else ()
    return Groups(images, TILE, inner, exchanges)


# --- the layer -----------------------------------------------------------------------------------------------------


class Moments(nnx.Variable):
    """Means and variances of one training call, averaged over this device's groups: [2, channels]."""


class BatchNorm(nnx.Module):
    """Batch normalization over (group, height, width) per channel, with groups that may span devices.

    Statistics and parameters are float32 or wider. In training mode each call stores its `Moments`; the train step
    averages them over the pod and moves the running statistics once per update, so that all replicas always hold the
    same state.

    Args:
        features: channels, the last axis of the input.
        zero_scale: initialize the scale with 0 instead of 1.
        scaled: learn a scale; without it the scale is 1.
        epsilon: added to the variance.
        param_dtype: dtype of parameters and statistics.

    Raises:
        UserError: the same layer is called twice in one pass in training mode.

    Examples:
        >>> layer = BatchNorm(3)
        >>> layer.train()
        >>> y = layer(jnp.arange(24.0).reshape(2, 2, 2, 3))
        >>> y.shape, float(jnp.abs(y.mean((0, 1, 2))).max()) < 1e-6
        ((2, 2, 2, 3), True)
        >>> layer.moments[...].shape
        (2, 3)

    Reference:
        Ioffe and Szegedy 2015, arXiv 1502.03167; Ying et al. 2018, arXiv 1811.06992 (distributed batch normalization).
    """

    def __init__(
        self,
        features: int,
        *,
        zero_scale: bool = False,
        scaled: bool = True,
        epsilon: float = 1e-5,
        param_dtype: DTypeLike = jnp.float32,
    ) -> None:
        self.scale = nnx.Param(fill(features, 0 if zero_scale else 1, param_dtype)) if scaled else None
        self.bias = nnx.Param(fill(features, 0, param_dtype))
        self.mean = nnx.BatchStat(fill(features, 0, param_dtype))
        self.var = nnx.BatchStat(fill(features, 1, param_dtype))
        self.epsilon = epsilon
        self.groups = Groups()
        self.sum_kernels: SumKernels | None = None
        self.use_running_average = True

    def __call__(
        self, x: Values, use_running_average: bool | None = None, activation: Activation | None = None
    ) -> Values:
        """Normalize x [images, ..., channels].

        Args:
            x: activations of this device's images.
            use_running_average: normalize by the running statistics, as in evaluation; None: as the module's mode says.
            activation: applied to the result; fused here, its gradient needs no pass over memory of its own.

        Returns:
            x normalized, in the dtype of x.
        """
        scale = self._get_scale()
        if self.use_running_average if use_running_average is None else use_running_average:
            inverse_std = lax.rsqrt(self.var[...] + self.epsilon)
            return _apply_affine(x, self.mean[...], inverse_std, scale, self.bias[...], activation)
        if hasattr(self, "moments"):
            raise UserError("a batch norm is used twice in one pass of the model; give each place one of its own")
        kernels = self._select_kernels(x, activation)
        y, moments = normalize(x, scale, self.bias[...], self.groups, self.epsilon, activation, kernels)
        self.moments = Moments(moments)
        return y

    def compute_affine(
        self, sums: Float[Array, "2 groups channels"] | tuple[Affine, Affine] | None, rows: int
    ) -> tuple[Affine, Affine]:
        """Return the normalization as a factor and an offset, for fused layers.

        Args:
            sums: sums of the values and of their squares over this device's part of each group; autodiff gives them
                their gradient, in one message. None: use the running statistics, for any groups.
            rows: values of each group and channel on this device.
        """
        if sums is None:
            mean, var = self.mean[...][None], self.var[...][None]
        else:
            if self.groups.axes:  # together, for one message; XLA joins gradients by an array's parts in a kernel
                sums = tuple(sum_over_tile(jnp.stack(sums), self.groups))
            count = rows * _count_devices(self.groups)
            mean, mean_square = sums[0] / count, sums[1] / count
            var = jnp.maximum(mean_square - mean * mean, 0)
            self.moments = Moments(jnp.stack([mean, var]).mean(axis=1))
        factor = self._get_scale() * lax.rsqrt(var + self.epsilon)
        return factor, self.bias[...] - mean * factor

    def _select_kernels(self, x: Values, activation: Activation | None) -> SumKernels | None:
        """Return the kernels if they can sum these values, and their gradient."""
        is_wide = self.bias[...].dtype == jnp.float32
        can_sum = (
            self.sum_kernels and is_wide and self.sum_kernels.can_sum(_count_groups(x, self.groups), x, activation)
        )
        return self.sum_kernels if can_sum else None

    def _get_scale(self) -> Statistic:
        return jnp.ones_like(self.bias[...]) if self.scale is None else self.scale[...]


def update_running_statistics(stats: PyTree, moments: PyTree, momentum: float) -> PyTree:
    """Move running statistics towards the pod's mean moments.

    Args:
        stats: pure nested dicts ({..., "mean", "var"}).
        moments: pure nested dicts ({..., "moments"}), averaged over the pod.
        momentum: the share of the old statistics.
    """
    if "moments" in moments:
        mean, var = moments["moments"]
        observed = {"mean": mean, "var": var}
        return {k: momentum * stats[k] + (1 - momentum) * observed[k] for k in stats}
    # A batch norm that the model never called has no moments and keeps its statistics.
    return {k: update_running_statistics(stats[k], moments[k], momentum) if k in moments else stats[k] for k in stats}


# --- the function and its gradient -----------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def normalize(
    x: Values,
    scale: Statistic,
    bias: Statistic,
    groups: Groups = Groups(),
    epsilon: float = 1e-5,
    activation: Activation | None = None,
    kernels: SumKernels | None = None,
) -> tuple[Values, Float[Array, "2 channels"]]:
    """Normalize every group of images by the group's own mean and variance.

    The gradient is written out because it sums over devices: both directions then cost exactly one message, and nothing
    depends on how a collective is transposed. The moments carry no gradient. Only x is kept for the gradient: with an
    activation, both passes of the backward direction compute the normalized values again, which is cheaper than to
    write and read them.

    Args:
        x: activations of this device's images.
        scale: its dtype is that of the statistics.
        bias: added after the scale.
        groups: how images map to groups.
        epsilon: added to the variance.
        activation: applied to the normalized values.
        kernels: which sum over groups, and can do so for these arguments; None: XLA sums.

    Returns:
        x normalized, in the dtype of x, and the mean over this device's groups of (mean, variance).
    """
    return _normalize_forward(x, scale, bias, groups, epsilon, activation, kernels)[0]


@jax.named_scope(SCOPE)
def _normalize_forward(
    x: Values,
    scale: Statistic,
    bias: Statistic,
    groups: Groups,
    epsilon: float,
    activation: Activation | None,
    kernels: SumKernels | None,
) -> Any:
    grouped = _split_groups(x, groups)
    if kernels:
        sums = sum_kernels.sum_squares(kernels, _count_groups(x, groups), x)
    else:
        wide = grouped.astype(scale.dtype)
        sums = jnp.stack([_sum_groups(wide), _sum_groups(wide * wide)])
    mean, mean_square = sum_over_tile(sums, groups) / _count_values(x, groups)
    var = jnp.maximum(mean_square - mean * mean, 0)
    inverse_std = lax.rsqrt(var + epsilon)
    y = _apply_affine(grouped, mean, inverse_std, scale, bias, activation).reshape(x.shape)
    moments = jnp.stack([mean, var]).mean(axis=1).reshape(2, -1)
    return (y, moments), (x, scale, bias, mean, inverse_std)


@jax.named_scope(SCOPE)
def _normalize_backward(
    groups: Groups,
    epsilon: float,
    activation: Activation | None,
    kernels: SumKernels | None,
    residuals: tuple[Array, ...],
    cotangents: Any,
) -> tuple[Values, Statistic, Statistic]:
    x, scale, bias, mean, inverse_std = residuals

    def normalize_again(x: Values) -> tuple[GroupedValues, GroupedValues]:
        """Return the normalized values, and the gradient with respect to the activation's input."""
        grouped = _split_groups(x, groups)
        dy = _split_groups(cotangents[0], groups).astype(scale.dtype)
        normalized = (grouped.astype(scale.dtype) - mean) * inverse_std
        if activation is None:
            return normalized, dy
        return normalized, jax.vjp(activation, normalized * scale + bias)[1](dy)[0]

    if kernels:
        vectors = mean, inverse_std, scale, bias
        local_sums = sum_kernels.sum_gradient(kernels, _count_groups(x, groups), activation, x, cotangents[0], vectors)
    elif activation is None:
        normalized, gradient = normalize_again(x)
        local_sums = jnp.stack([_sum_groups(gradient), _sum_groups(gradient * normalized)])
    else:  # the barriers keep the compiler from storing what is cheaper to compute twice
        normalized, gradient = normalize_again(lax.optimization_barrier(x))
        local_sums = _sum_groups_jointly(gradient, gradient * normalized)
    mean_dy, mean_dy_normalized = sum_over_tile(local_sums, groups) / _count_values(x, groups)
    if kernels or activation is not None:
        normalized, gradient = normalize_again(lax.optimization_barrier((x, mean_dy))[0])
    dx = (scale * inverse_std) * (gradient - mean_dy - normalized * mean_dy_normalized)
    dbias, dscale = local_sums.sum(axis=1).reshape(2, -1)  # this device's share: gradient summation adds the others'
    return dx.reshape(x.shape).astype(x.dtype), dscale, dbias


normalize.defvjp(_normalize_forward, _normalize_backward)


@jax.named_scope(SCOPE)
def _apply_affine(
    x: Float[Array, "*values channels"],
    mean: Float[Array, "*groups channels"],
    inverse_std: Float[Array, "*groups channels"],
    scale: Statistic,
    bias: Statistic,
    activation: Activation | None = None,
) -> Float[Array, "*values channels"]:
    y = (x.astype(scale.dtype) - mean) * (inverse_std * scale) + bias
    return (y if activation is None else activation(y)).astype(x.dtype)


# --- groups and tiles ------------------------------------------------------------------------------------------------


def sum_over_tile(sums: Float[Array, "*sums"], groups: Groups) -> Float[Array, "*sums"]:
    """Sum over all devices that hold images of a group."""
    outer = tuple(axis for axis in groups.axes if axis not in groups.inner)
    if groups.exchanges:
        return sum_over_chips(lax.psum(sums, CORE) if CORE in groups.axes else sums)
    for axes in (groups.inner, outer):
        sums = lax.psum(sums, axes) if axes else sums
    return sums


def _split_groups(x: Values, groups: Groups) -> GroupedValues:
    images = groups.images or x.shape[0]
    return x.reshape(x.shape[0] // images, images, -1, x.shape[-1])


def _sum_groups(
    values: Inexact[Array, "groups group_images all_places channels"],
) -> Inexact[Array, "groups 1 1 channels"]:
    """Each image is summed first; on a GPU, summing all at once is neither faster nor slower (docs/results.md)."""
    return values.sum(axis=2, keepdims=True).sum(axis=1, keepdims=True)


def _sum_groups_jointly(first: GroupedValues, second: GroupedValues) -> Float[Array, "2 groups 1 1 channels"]:
    """Return the group sums of two arrays, stacked, by one reduction over complex numbers.

    XLA fuses into a reduction what it reads. With two reductions it would compute what both read twice, or store it.
    """
    sums = _sum_groups(lax.complex(first, second))
    return jnp.stack([sums.real, sums.imag])


def _count_values(x: Values, groups: Groups) -> int:
    """Return how many values each statistic of a group averages over."""
    return math.prod(x.shape[:-1]) // _count_groups(x, groups) * _count_devices(groups)


def _count_groups(x: Values, groups: Groups) -> int:
    """Return of how many groups this device has images."""
    return x.shape[0] // (groups.images or x.shape[0])


def _count_devices(groups: Groups) -> int:
    """Return how many devices hold images of a group."""
    return math.prod(lax.axis_size(axis) for axis in groups.axes)


# --- users' models ---------------------------------------------------------------------------------------------------


def replace_batch_norms(model: nnx.Module) -> nnx.Module:
    """Replace every flax `nnx.BatchNorm` in `model` by a distributed one, in place, with its weights and statistics.

    Raises:
        UserError: a batch norm has no scale or no bias, or does not normalize its last axis.
    """
    replacements: dict[int, BatchNorm] = {}  # a module that is shared under two names stays one module
    for _, module in list(nnx.iter_modules(model)):
        for name, child in list(vars(module).items()):
            if isinstance(child, nnx.BatchNorm):
                setattr(module, name, replacements.setdefault(id(child), _convert(child)))
    return model


def _convert(flax_norm: nnx.BatchNorm) -> BatchNorm:
    if flax_norm.scale is None or flax_norm.bias is None or flax_norm.axis not in (-1, (-1,)):
        raise UserError("a model's nnx.BatchNorm must have a scale and a bias and normalize its last axis")
    distributed = BatchNorm(flax_norm.num_features, epsilon=flax_norm.epsilon)
    for name in ("scale", "bias", "mean", "var"):
        getattr(distributed, name)[...] = getattr(flax_norm, name)[...]
    return distributed
