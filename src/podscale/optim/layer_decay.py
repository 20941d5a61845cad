"""Layer-wise learning-rate decay: a layer learns more slowly, the further it is from the head (`schedule.layer_decay`).

The rate of a layer is `layer_decay` times that of the next one, and the head has the full rate (Clark et al. 2020,
arXiv 2003.10555, section 3.2). Layers are those of the model's list `layers`; one without a kernel, such as the norm
before the head, counts with the layer after it.
"""

import jax
import optax
from jax.tree_util import keystr
from jaxtyping import PyTree

from podscale.errors import UserError


def scale_by_layer(decay: float) -> optax.GradientTransformation:
    """Return a transformation that scales the updates of each layer, which is to scale its learning rate."""

    def update(updates: PyTree, params: PyTree) -> PyTree:
        factors = compute_layer_factors(updates, decay)
        return jax.tree.map(lambda u, factor: u * factor, updates, factors)

    return optax.stateless(update)


def compute_layer_factors(params: PyTree, decay: float) -> PyTree:
    """Return a tree like `params` with the factor of each parameter's learning rate.

    Raises:
        UserError: the model has no list of layers.

    >>> params = {"layers": {0: {"kernel": 1}, 1: {"kernel": 1}, 2: {"scale": 1}, 3: {"kernel": 1}}}
    >>> compute_layer_factors(params, 0.5)["layers"]
    {0: {'kernel': 0.25}, 1: {'kernel': 0.5}, 2: {'scale': 1.0}, 3: {'kernel': 1.0}}
    """
    names = [keystr(path, simple=True, separator=".").split(".") for path, _ in jax.tree.leaves_with_path(params)]
    if any(len(name) < 2 or name[0] != "layers" or not name[1].isdecimal() for name in names):
        raise UserError("schedule.layer_decay needs a model whose layers are all in a list `layers`")
    with_kernel = sorted({int(name[1]) for name in names if "kernel" in name[2:]})
    last = len(with_kernel) - 1
    depths = [sum(index < int(name[1]) for index in with_kernel) for name in names]
    factors = [decay ** (last - min(depth, last)) for depth in depths]
    return jax.tree.unflatten(jax.tree.structure(params), factors)
