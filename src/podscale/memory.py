"""What a recipe needs of one device's memory, before anything is compiled.

Parameters and optimizer state are exact. Activations are an estimate: what the backward pass keeps of each convolution
and matrix product is its input and its output, of which one lives on as the next one's.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import optax
from flax import nnx

from podscale import models, optim
from podscale import plan as plans
from podscale.data.index import open_index
from podscale.data.order import Order
from podscale.models.functional import Functional, Tree, functional
from podscale.norm import Groups
from podscale.options import Options
from podscale.plan import Counts, Memory, Plan
from podscale.pod import Pod
from podscale.recipe import Recipe

# Bytes alive at the peak per byte of convolution output: the output itself and its normalized twin, kept for the
# backward pass, and the gradients in flight.
KEPT_PER_OUTPUT = 2.2


def footprint(
    recipe: Recipe, net: Functional, params: Tree, stats: Tree, optimizer: optax.GradientTransformation
) -> Memory:
    """Bytes per device that training the recipe takes; arrays may be abstract."""
    averages = 1 + bool(recipe.optimizer.average)
    image_bytes = 3 * recipe.data.image_size**2
    return Memory(
        parameters=_bytes(params) * averages + _bytes(net.split(params)[0]) + _bytes(stats) * averages,  # and gradients
        optimizer=_bytes(jax.eval_shape(optimizer.init, params)),
        input_per_image=image_bytes,
        activations_per_image=int(KEPT_PER_OUTPUT * _output_bytes(recipe, net, params, stats)) + 3 * image_bytes,
    )


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _output_bytes(recipe: Recipe, net: Functional, params: Tree, stats: Tree) -> int:
    """Bytes that all convolutions and matrix products of one image's forward pass write."""
    size = recipe.data.image_size
    image = jax.ShapeDtypeStruct((1, size, size, 3), recipe.model.precision)
    traced = jax.make_jaxpr(lambda p, s, x: net.train(p, s, x, Groups()))(params, stats, image)
    return sum(
        _bytes([out.aval for out in equation.outvars])
        for equation in equations(traced.jaxpr)
        if equation.primitive.name in ("conv_general_dilated", "dot_general")
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, those of the functions it calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from equations(getattr(value, "jaxpr", value))


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def planned(recipe: Recipe, pod: Pod, options: Options) -> Plan:
    """The plan for a pod that need not be here; the data need not be here either if the recipe gives its counts."""
    data = recipe.data
    if data.train_samples and data.val_samples and data.classes:
        counts = Counts(data.train_samples, data.val_samples, data.classes)
    else:
        found = open_index(data)
        counts = Counts(len(found.train), len(found.val), len(found.classes))
    Order(counts.train, data.lanes, recipe.batch.size, recipe.train.seed)  # refuses impossible lanes
    model = nnx.eval_shape(lambda: models.build(recipe.model, counts.classes, data.image_size))
    net, params, stats = functional(model, recipe.model.freeze)
    optimizer = net.learner(optim.optimizer(recipe, optim.schedule(recipe, 1, 1.0), stem=net.stem, head=net.head))
    return plans.make(recipe, pod, counts, options, footprint(recipe, net, params, stats, optimizer))
