"""The networks, by name: `build` makes the one that a recipe names, `register` adds another.

A builder takes the recipe's model section, the number of classes, the side of the pictures and the random keys, and
returns a module that maps pictures [images, height, width, 3] to logits [images, classes]. A module that normalizes
over the batch uses `podscale.BatchNorm`, so that its groups follow the recipe on every pod. One that has a method
`fit` is shown some training pictures before training begins, normalized, float32 [images, height, width, 3].
"""

import functools
from collections.abc import Callable

import jax
from flax import nnx

from podscale import recipe
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.models import cifarnet, resnet

Builder = Callable[[recipe.Model, int, int, nnx.Rngs], nnx.Module]
_builders: dict[str, Builder] = {name: functools.partial(resnet.build, name) for name in resnet.DEPTHS}
_builders["cifarnet"] = cifarnet.build


def names() -> list[str]:
    """The names that `model.name` of a recipe may take.

    >>> names()[:3]
    ['resnet8', 'resnet18', 'resnet34']
    """
    return list(_builders)


def register(name: str) -> Callable[[Builder], Builder]:
    """Make the decorated builder available to recipes under `name`.

    >>> @register("linear")
    ... def linear(config, classes, image_size, rngs):
    ...     flatten = lambda images: images.reshape(len(images), -1)
    ...     return nnx.Sequential(flatten, nnx.Linear(3 * image_size**2, classes, rngs=rngs))
    >>> build(recipe.Model(name="linear"), classes=10, image_size=8)(jax.numpy.ones((2, 8, 8, 3))).shape
    (2, 10)
    >>> unregister("linear")
    """

    def add(builder: Builder) -> Builder:
        if name in _builders:
            raise UserError(f"there is already a model {name!r}; choose another name, or unregister that one first")
        _builders[name] = builder
        return builder

    return add


def unregister(name: str) -> None:
    """Forget a name; nothing happens if it is unknown."""
    _builders.pop(name, None)


def build(config: recipe.Model, classes: int, image_size: int, seed: int = 0) -> nnx.Module:
    """The network that `config` names, freshly drawn from `seed`."""
    if config.name not in _builders:
        raise UserError(f"there is no model {config.name!r}: {suggest_names(config.name, _builders)}")
    if classes < 1:
        raise UserError(f"a model needs at least one class, not {classes}")
    if config.precision == "float64" and not jax.config.read("jax_enable_x64"):
        raise UserError("model.precision float64 needs JAX's 64-bit mode: set JAX_ENABLE_X64=1 in the environment")
    return _builders[config.name](config, classes, image_size, nnx.Rngs(seed))
