"""Predict the seconds that one device takes to compute a step on its images, without communication.

The model has three inputs: how a step's time grows with the images on a device (the *curve*: for TPUs the compiler's
own cycle counts, for GPUs a measurement), how fast one chip trains ResNet-50 (the *level*: a published rate of one
board or node), and what a model demands of the hardware (its *work*). A curve is split into a fixed cost per step and a
cost that depends on the images. The fixed cost scales with the number of layers, the other with a roofline of the
model's work.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import jax
from flax import nnx

from podscale.forecast.chips import Chip, get_chip
from podscale.forecast.software import PODSCALE, Software
from podscale.models import registry
from podscale.models.functional import FunctionalModel, Tree, make_functional
from podscale.models.jaxpr import iterate_equations, list_remat_layers
from podscale.optim.muon_matrices import list_matrices
from podscale.parallel.batch_norm import Groups
from podscale.parallel.shared_matrices import Kind
from podscale.recipe import Recipe, list_size_shares

# How often a training step moves the bytes of each convolution's output to or from memory. It reproduces the TPU
# compiler's count for ResNet-50, 254 MB an image ("bytes accessed" at 16 and 128 images a core, libtpu 0.0.51).
PASSES = 11.4
FORWARD = 1 / 3  # of a training step; the backward pass computes twice as much


@dataclass(frozen=True)
class Work:
    """What a model demands of the hardware."""

    flops: float  # of a training step, per image
    bytes: float  # to and from memory, per image
    layers: int  # convolutions and dense layers
    norms: int
    norm_channels: int  # of all batch norms
    parameters: int
    matrices: Mapping[str, Kind] = field(default_factory=dict)  # that the optimizer orthogonalizes, by shape


RESNET50 = Work(24.75e9, 253e6, 54, 53, 26_560, 25_557_032)  # at 224 px in bfloat16: the model of all curves


def count_work(recipe: Recipe, classes: int) -> Work:
    """Return the work of the recipe's model, counted from its program."""
    model = nnx.eval_shape(lambda: registry.build_model(recipe.model, classes, recipe.data.image_size))
    return count_model_work(recipe, *make_functional(model))


def count_model_work(recipe: Recipe, net: FunctionalModel, params: Tree, stats: Tree) -> Work:
    """Return the work of a model on the recipe's training images, averaged over their sizes; arrays may be abstract."""
    sizes = list_size_shares(recipe)
    works = [_count_work_at(recipe, net, params, stats, size) for size, _ in sizes]
    flops = sum(share * work.flops for work, (_, share) in zip(works, sizes, strict=True))
    moved = sum(share * work.bytes for work, (_, share) in zip(works, sizes, strict=True))
    return replace(works[-1], flops=flops, bytes=moved, matrices=list_recipe_matrices(recipe, net, params))


def list_recipe_matrices(recipe: Recipe, net: FunctionalModel, params: Tree) -> dict[str, Kind]:
    """Return the matrices that the recipe's optimizer orthogonalizes: Muon's; parameters may be abstract."""
    settings, trained = recipe.optimizer, net.split(params)[0]
    if settings.name != "muon":
        return {}
    return list_matrices(trained, net.head, settings.newton_schulz, recipe.model.precision)


def _count_work_at(recipe: Recipe, net: FunctionalModel, params: Tree, stats: Tree, size: int) -> Work:
    """Return the work of a model on images of this size."""
    image = jax.ShapeDtypeStruct((1, size, size, 3), recipe.model.precision)
    traced = jax.make_jaxpr(lambda p, s, x: net.train(p, s, x, Groups()))(params, stats, image)
    products = _list_products(traced.jaxpr)
    again = [e for layer in list_remat_layers(traced.jaxpr) for e in _list_products(layer.params["jaxpr"])]
    moments = [leaf.shape for leaf in jax.tree.leaves(stats)]  # a mean and a variance for each batch norm
    return Work(
        flops=sum(_count_flops(e) for e in products) / FORWARD + sum(_count_flops(e) for e in again),
        bytes=PASSES * sum(out.aval.size * out.aval.dtype.itemsize for e in products for out in e.outvars),
        layers=max(1, len(products)),
        norms=len(moments) // 2,
        norm_channels=sum(math.prod(shape) for shape in moments) // 2,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    )


def _list_products(jaxpr: Any) -> list[Any]:
    """Return the convolutions and matrix products of a program."""
    return [e for e in iterate_equations(jaxpr) if e.primitive.name in ("conv_general_dilated", "dot_general")]


def _count_flops(equation: Any) -> float:
    """Return the multiplications and additions of one convolution or matrix product."""
    left, right = (v.aval for v in equation.invars)
    out = equation.outvars[0].aval
    if equation.primitive.name == "conv_general_dilated":
        outputs = right.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2 * out.size * right.size / outputs
    contracted = equation.params["dimension_numbers"][0][0]
    return 2 * out.size * math.prod(left.shape[axis] for axis in contracted)


# --- seconds ---------------------------------------------------------------------------------------------------------


def predict_roofline_s(row: Chip, work: Work) -> float:
    """Return seconds per image at the chip's peak rates, arithmetic and memory one after the other."""
    return work.flops / row.flops + work.bytes / row.memory_rate


def predict_step_s(row: Chip, work: Work, images: float, software: Software = PODSCALE) -> float:
    """Return the seconds that one device takes to train on so many images and to update all parameters."""
    return predict_images_s(row, work, images, software) + predict_update_s(row, work, software)


def predict_images_s(row: Chip, work: Work, images: float, software: Software = PODSCALE) -> float:
    """Return the seconds of the forward and backward pass of so many images, and of their layout."""
    curve = _load_curve(row.kind)
    scale = predict_roofline_s(row, work) / predict_roofline_s(row, RESNET50)
    fixed_s = (curve.fixed_s - _predict_saved_gaps_s(row, software.kernels)) * work.layers / RESNET50.layers
    layout_s = 0.0 if software.host_layout else curve.layout_s
    return fixed_s + scale * curve.predict_images_s(images) + layout_s


def predict_update_s(row: Chip, work: Work, software: Software = PODSCALE, share: float = 1.0) -> float:
    """Return the seconds in which a device updates this share of the parameters, copies of the gradients included."""
    curve = _load_curve(row.kind)
    copy_s = 0.0 if software.sums_in_place else curve.copy_s
    return (share * curve.update_s + copy_s) * work.parameters / RESNET50.parameters


def predict_forward_s(row: Chip, work: Work, images: float, software: Software = PODSCALE) -> float:
    """Return the seconds that one device takes to evaluate so many images."""
    return FORWARD * predict_images_s(row, work, images, software)


def predict_best_rate(row: Chip, work: Work) -> float:
    """Return the images per second of one device in the limit of many images per step."""
    many = 1e6
    return many / predict_step_s(row, work, many)


@dataclass(frozen=True)
class _Curve:
    """A step's seconds as a function of images per device: `fixed_s`, plus `points` of (images, seconds).

    The other parts do not depend on the images; they are 0 where the points contain them.
    """

    fixed_s: float
    points: tuple[tuple[int, float], ...]
    update_s: float = 0.0
    copy_s: float = 0.0
    layout_s: float = 0.0

    def predict_images_s(self, images: float) -> float:
        """Interpolate linearly between the points, starting from 0 seconds at 0 images; extrapolate past the last."""
        knots = [(0, 0.0), *self.points]
        (m0, t0), (m1, t1) = next((ends for ends in pairwise(knots) if images <= ends[1][0]), (knots[-2], knots[-1]))
        return t0 + (t1 - t0) * (images - m0) / (m1 - m0)

    def fit_line(self) -> "_Curve":
        """Return the straight line through the first and the last point: the bends do not carry over to other chips."""
        line = _split_points((self._point(0), self._point(-1)))
        return replace(self, fixed_s=line.fixed_s, points=line.points)

    def _point(self, index: int) -> tuple[int, float]:
        images, seconds = self.points[index]
        return images, self.fixed_s + seconds

    def scale(self, fixed: float, images: float) -> "_Curve":
        """Return the curve with its fixed parts and its cost of the images scaled by these factors."""
        parts = {name: fixed * getattr(self, name) for name in ("fixed_s", "update_s", "copy_s", "layout_s")}
        return _Curve(points=tuple((m, t * images) for m, t in self.points), **parts)


@functools.cache
def _load_curve(kind: str) -> _Curve:
    """Return the chip's own curve, or the curve it borrows from another chip, scaled to its level.

    On a TPU the fixed cost of a step is work as well (weights to load) and scales with the chip. On a GPU it is
    hundreds of kernels launched one after the other, and scales with the clock.
    """
    row = get_chip(kind)
    if row.points:
        level = _compute_level(row)
        return _make_curve(row).scale(level, level)
    lender, borrowed = get_chip(row.curve), _load_curve(row.curve).fit_line()
    clocks = _compute_clock_ratio(lender, row)
    if not row.rate:
        ratio = _compute_roofline_ratio(row, lender)
        return borrowed.scale(ratio if row.is_torus else clocks, ratio)
    published = row.rate_images * row.cores / row.rate
    fixed_s = clocks * borrowed.fixed_s - _predict_saved_gaps_s(row, row.rate_kernels)
    return borrowed.scale(clocks, (published - fixed_s) / borrowed.predict_images_s(row.rate_images))


def _compute_roofline_ratio(row: Chip, lender: Chip) -> float:
    """Return how much longer a device takes for its images than one of the lender's, by their peak rates."""
    return predict_roofline_s(row, RESNET50) * row.cores / (predict_roofline_s(lender, RESNET50) * lender.cores)


def _compute_clock_ratio(lender: Chip, row: Chip) -> float:
    """Return how much longer the same sequence of kernels takes to launch than on the lender."""
    name = "clock_rate_ghz"
    return float(lender.target[name] / row.target[name]) if row.target and lender.target else 1.0


def _predict_saved_gaps_s(row: Chip, kernels: int) -> float:
    """Return the seconds that a program of so many kernels saves between them, against that of the curve.

    The curve may be another chip's. Nothing is saved where no number of kernels is known.
    """
    counted = row
    while not counted.kernels and counted.curve:
        counted = get_chip(counted.curve)
    if not kernels or not counted.kernels:
        return 0.0
    return (counted.kernels - kernels) * counted.gap_s * _compute_clock_ratio(counted, row)


def _compute_level(row: Chip) -> float:
    """Return published over estimated seconds: by the chip's own rate, else by the chip that `curve` names, else 1.

    Without a rate of its own, a chip with many images a device takes as long for them as that other chip, by their
    rooflines. The published rates are those of programs whose hosts lay out the images and whose sums are in place.
    """
    curve = _make_curve(row)
    if row.rate:
        estimate = curve.fixed_s + curve.predict_images_s(row.rate_images) + curve.update_s
        return row.rate_images * row.cores / row.rate / estimate
    if not row.curve:
        return 1.0
    images = row.points[-1][0]
    lent, lender = _load_curve(row.curve), get_chip(row.curve)
    lent_s = lent.fixed_s + lent.predict_images_s(images)
    return _compute_roofline_ratio(row, lender) * lent_s / (curve.fixed_s + curve.predict_images_s(images))


def _make_curve(row: Chip) -> _Curve:
    """Return the curve of a chip's own points, before its level."""
    return replace(_split_points(row.points), update_s=row.update_s, copy_s=row.copy_s, layout_s=row.layout_s)


def _split_points(points: tuple[tuple[int, float], ...]) -> _Curve:
    """Split points into the fixed cost of a step, by the line through the first two, and the cost of the images."""
    (m0, t0), (m1, t1) = points[:2]
    fixed = max(t0 - (t1 - t0) / (m1 - m0) * m0, 0.0)
    return _Curve(fixed, tuple((m, t - fixed) for m, t in points))
