"""Estimate the memory that a recipe needs on one device, before anything is compiled.

Parameters and optimizer state are exact. Activations are an estimate: of each convolution and matrix product the
backward pass keeps input and output, and an output is also the next input.
"""

import math
from typing import Any

import jax
import optax

from podscale.models.functional import FunctionalModel, Tree
from podscale.models.jaxpr import iterate_equations
from podscale.parallel.batch_norm import Groups
from podscale.plan import Memory
from podscale.recipe import Recipe

# Bytes alive at the peak per byte of convolution output: the output itself and its normalized copy, kept for the
# backward pass, and the gradients in flight.
BYTES_PER_OUTPUT_BYTE = 2.2


def estimate_memory(
    recipe: Recipe, net: FunctionalModel, params: Tree, stats: Tree, optimizer: optax.GradientTransformation
) -> Memory:
    """Return the bytes per device that training the recipe takes; arrays may be abstract."""
    averages = 1 + bool(recipe.optimizer.average)
    image_bytes = 3 * recipe.data.image_size**2
    return Memory(
        parameters=_count_bytes(params) * averages
        + _count_bytes(net.split(params)[0])
        + _count_bytes(stats) * averages,  # and gradients
        optimizer=_count_bytes(jax.eval_shape(optimizer.init, params)),
        activations_per_image=int(BYTES_PER_OUTPUT_BYTE * _count_output_bytes(recipe, net, params, stats))
        + 3 * image_bytes,
    )


def _count_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _count_output_bytes(recipe: Recipe, net: FunctionalModel, params: Tree, stats: Tree) -> int:
    """Count the bytes that all convolutions and matrix products of one image's forward pass write."""
    size = recipe.data.image_size
    image = jax.ShapeDtypeStruct((1, size, size, 3), recipe.model.precision)
    traced = jax.make_jaxpr(lambda p, s, x: net.train(p, s, x, Groups()))(params, stats, image)
    return sum(
        _count_bytes([out.aval for out in equation.outvars])
        for equation in iterate_equations(traced.jaxpr)
        if equation.primitive.name in ("conv_general_dilated", "dot_general")
    )
