"""Estimate the memory that a recipe needs on one device, before anything is compiled.

Parameters and optimizer state are exact. Activations are an estimate: of each convolution and matrix product the
backward pass keeps input and output, and an output is also the next input.
"""

import math

import jax
import optax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jaxtyping import PyTree

from podscale.errors import UserError
from podscale.models.functional import FunctionalModel, Tree
from podscale.models.jaxpr import iterate_equations, list_remat_layers
from podscale.parallel.batch_norm import Groups
from podscale.plan import Memory, Plan
from podscale.recipe import Recipe, find_largest_size

# Bytes alive at the peak per byte of convolution output: the output itself and its normalized copy, kept for the
# backward pass, and the gradients in flight.
BYTES_PER_OUTPUT_BYTE = 2.2


def estimate_memory(
    recipe: Recipe, net: FunctionalModel, params: Tree, stats: Tree, optimizer: optax.GradientTransformation
) -> Memory:
    """Return the bytes per device that training the recipe takes; arrays may be abstract."""
    averages = 1 + bool(recipe.optimizer.average)
    image_bytes = 3 * find_largest_size(recipe) ** 2
    return Memory(
        parameters=_count_bytes(params) * averages
        + _count_bytes(net.split(params)[0])
        + _count_bytes(stats) * averages,  # and gradients
        optimizer=_count_bytes(jax.eval_shape(optimizer.init, params)),
        activations_per_image=int(BYTES_PER_OUTPUT_BYTE * _count_output_bytes(recipe, net, params, stats))
        + 3 * image_bytes,
    )


def _count_bytes(tree: PyTree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _count_output_bytes(recipe: Recipe, net: FunctionalModel, params: Tree, stats: Tree) -> int:
    """Count the bytes that all convolutions and matrix products of one image's forward pass write."""
    size = find_largest_size(recipe)
    image = jax.ShapeDtypeStruct((1, size, size, 3), recipe.model.precision)
    traced = jax.make_jaxpr(lambda p, s, x: net.train(p, s, x, Groups()))(params, stats, image)
    # A layer that is computed again keeps its output alone, and what is inside the largest of them once.
    layers = list_remat_layers(traced.jaxpr)
    inside = [_count_product_bytes(layer.params["jaxpr"]) for layer in layers]
    outputs = _count_bytes([out.aval for layer in layers for out in _list_new_outputs(layer)])
    everything = _count_product_bytes(traced.jaxpr)
    return min(everything, everything - sum(inside) + outputs + max(inside, default=0))


def _list_new_outputs(layer: JaxprEqn) -> list[Var]:
    """Return the outputs of a layer that it computes; flax also returns the layer's parameters, as they came."""
    inner = layer.params["jaxpr"]
    given = {id(variable) for variable in inner.invars}
    return [out for out, source in zip(layer.outvars, inner.outvars, strict=True) if id(source) not in given]


def _count_product_bytes(jaxpr: Jaxpr) -> int:
    """Count the bytes that all convolutions and matrix products of a program write."""
    return sum(
        _count_bytes([out.aval for out in equation.outvars])
        for equation in iterate_equations(jaxpr)
        if equation.primitive.name in ("conv_general_dilated", "dot_general")
    )


def check_memory(plan: Plan) -> None:
    """Refuse to train a plan that a device's memory cannot hold.

    Raises:
        UserError: the message names a batch size that fits, if the input is what does not.
    """
    memory, limit = plan.memory, plan.pod.memory_bytes
    if (need := memory.total(plan.micro_images, plan.input_images)) <= limit:
        return
    sizes = (f"{number / 2**30:,.1f} GiB" for number in (need, limit))
    problem = "batch.size {:,} needs about {} of memory per device, but only {} are available".format(
        plan.recipe.batch.size, *sizes
    )
    batch = plan.images_per_device // 2
    while (
        batch
        and memory.total(min(plan.micro_images, batch), plan.input_images * batch // plan.images_per_device) > limit
    ):
        batch //= 2
    if batch * plan.pod.size >= plan.recipe.batch.span:
        raise UserError(f"{problem}; --batch.size {batch * plan.pod.size} would fit")
    raise UserError(f"{problem}; reduce batch.span, data.image_size or the model, or use more devices")
