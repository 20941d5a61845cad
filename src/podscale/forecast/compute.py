"""Compute: seconds that one device takes for its images of a step, without talking to others.

Three things are known: how a step's time grows with the images on a device (the *curve*: for TPUs the compiler's own
cycle counts, for GPUs a measurement), how fast one chip trains ResNet-50 (the *level*: a published rate of one board or
node), and what a model asks for (its *work*). A curve is split into what every step costs, whatever its images, and
what the images cost. The first goes with the number of layers, the second with a roofline of the model's work.
"""

import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
from flax import nnx

from podscale.forecast.chips import Chip, chip
from podscale.models import registry
from podscale.models.functional import Functional, Tree, functional
from podscale.models.jaxpr import iterate_equations
from podscale.parallel.batch_norm import Groups
from podscale.recipe import Recipe

# Times that a training step moves the bytes of each convolution's output to or from memory: what the TPU compiler's
# count for ResNet-50 comes to, 254 MB an image ("bytes accessed" at 16 and 128 images a core, libtpu 0.0.51).
PASSES = 11.4
FORWARD = 1 / 3  # of a training step; the backward pass computes twice as much


@dataclass(frozen=True)
class Work:
    """What a model asks of the hardware."""

    flops: float  # of a training step, an image
    bytes: float  # to and from memory, an image
    layers: int  # convolutions and dense layers
    norms: int
    norm_channels: int  # of all batch norms
    parameters: int


RESNET50 = Work(24.75e9, 253e6, 54, 53, 26_560, 25_557_032)  # at 224 px in bfloat16: what the curves are of


def work_of(recipe: Recipe, classes: int) -> Work:
    """The work of the recipe's own model, counted from its program."""
    model = nnx.eval_shape(lambda: registry.build(recipe.model, classes, recipe.data.image_size))
    return work_in(recipe, *functional(model))


def work_in(recipe: Recipe, net: Functional, params: Tree, stats: Tree) -> Work:
    """The work of a model on the recipe's pictures; arrays may be abstract."""
    size = recipe.data.image_size
    image = jax.ShapeDtypeStruct((1, size, size, 3), recipe.model.precision)
    traced = jax.make_jaxpr(lambda p, s, x: net.train(p, s, x, Groups()))(params, stats, image)
    products = [
        e for e in iterate_equations(traced.jaxpr) if e.primitive.name in ("conv_general_dilated", "dot_general")
    ]
    moments = [leaf.shape for leaf in jax.tree.leaves(stats)]  # a mean and a variance for each batch norm
    return Work(
        flops=sum(_flops(e) for e in products) / FORWARD,
        bytes=PASSES * sum(out.aval.size * out.aval.dtype.itemsize for e in products for out in e.outvars),
        layers=max(1, len(products)),
        norms=len(moments) // 2,
        norm_channels=sum(math.prod(shape) for shape in moments) // 2,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    )


def _flops(equation: Any) -> float:
    """Multiplications and additions of one convolution or matrix product."""
    left, right = (v.aval for v in equation.invars)
    out = equation.outvars[0].aval
    if equation.primitive.name == "conv_general_dilated":
        outputs = right.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2 * out.size * right.size / outputs
    contracted = equation.params["dimension_numbers"][0][0]
    return 2 * out.size * math.prod(left.shape[axis] for axis in contracted)


# --- seconds ---------------------------------------------------------------------------------------------------------


def roofline_s(row: Chip, work: Work) -> float:
    """Seconds an image at the chip's peaks, arithmetic and memory one after the other."""
    return work.flops / row.flops + work.bytes / row.memory_rate


def step_s(row: Chip, work: Work, images: float) -> float:
    """Seconds that one device takes to train on so many images."""
    curve = _curve(row.kind)
    scale = roofline_s(row, work) / roofline_s(row, RESNET50)
    return curve.fixed_s * work.layers / RESNET50.layers + scale * curve.images_s(images)


def forward_s(row: Chip, work: Work, images: float) -> float:
    """Seconds that one device takes to evaluate so many images."""
    return FORWARD * step_s(row, work, images)


def best_rate(row: Chip, work: Work) -> float:
    """Images a second of one device that has as many as it could wish for."""
    many = 1e6
    return many / step_s(row, work, many)


@dataclass(frozen=True)
class _Curve:
    """A step's seconds over images a device: `fixed_s`, and `points` (images, seconds) above it."""

    fixed_s: float
    points: tuple[tuple[int, float], ...]

    def images_s(self, images: float) -> float:
        """By straight lines between the points, from none at no images; past the last point, its line goes on."""
        knots = [(0, 0.0), *self.points]
        (m0, t0), (m1, t1) = next((ends for ends in pairwise(knots) if images <= ends[1][0]), (knots[-2], knots[-1]))
        return t0 + (t1 - t0) * (images - m0) / (m1 - m0)

    def line(self) -> "_Curve":
        """The straight line through the first and the last point: what holds on another chip, bends do not."""
        return _split((self._point(0), self._point(-1)))

    def _point(self, index: int) -> tuple[int, float]:
        images, seconds = self.points[index]
        return images, self.fixed_s + seconds

    def scaled(self, fixed: float, images: float) -> "_Curve":
        return _Curve(self.fixed_s * fixed, tuple((m, t * images) for m, t in self.points))


@functools.cache
def _curve(kind: str) -> _Curve:
    """The chip's own curve, or another's, brought to its level.

    What a step costs before its first image is work too on a TPU (weights to load and to update), and grows with the
    chip. On a GPU it is hundreds of kernels started one after the other, and goes with the clock.
    """
    row = chip(kind)
    if row.points:
        level = _level(row)
        return _split(row.points).scaled(level, level)
    lender, lent = chip(row.curve), _curve(row.curve).line()
    if not row.rate:
        ratio = roofline_s(row, RESNET50) * row.cores / (roofline_s(lender, RESNET50) * lender.cores)
        return lent.scaled(ratio if row.torus else _clocks(lender, row), ratio)
    published = row.rate_images * row.cores / row.rate
    fixed = _clocks(lender, row)
    return lent.scaled(fixed, (published - fixed * lent.fixed_s) / lent.images_s(row.rate_images))


def _clocks(lender: Chip, row: Chip) -> float:
    """How much longer the same kernels take to start, one after the other."""
    name = "clock_rate_ghz"
    return float(lender.target[name] / row.target[name]) if row.target and lender.target else 1.0


def _level(row: Chip) -> float:
    """Published over estimated seconds: of the chip itself, else of the one that `curve` names, else 1."""
    if row.rate:
        curve = _split(row.points)
        return row.rate_images * row.cores / row.rate / (curve.fixed_s + curve.images_s(row.rate_images))
    return _level(chip(row.curve)) if row.curve else 1.0


def _split(points: tuple[tuple[int, float], ...]) -> _Curve:
    """What a step costs before its first image, by the line through the first two points, and what the images cost."""
    (m0, t0), (m1, t1) = points[:2]
    fixed = max(t0 - (t1 - t0) / (m1 - m0) * m0, 0.0)
    return _Curve(fixed, tuple((m, t - fixed) for m, t in points))
