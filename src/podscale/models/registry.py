"""Networks by name: `build_model` builds the one that a recipe names, `register_model` adds another.

A builder takes the recipe's model section, the number of classes, the side of the images in pixels and the random keys,
and returns a module that maps images [images, height, width, 3] to logits [images, classes]. A module that normalizes
over the batch uses `podscale.BatchNorm`, so that its groups follow the recipe on every pod.

If the module has a method `fit_parameters`, a run that starts from scratch calls it with some training images,
normalized, float32 [images, height, width, 3]. It returns the parameters that follow from them as arrays by name, such
as `layers.0.kernel`. It is called on a module of shapes without values, so it must not read the module's arrays.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import jax
from flax import nnx

from podscale import recipe
from podscale.config.registry import Registry
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.models import cifarnet, convnext, efficientnet, resnet, vit

Builder = Callable[[recipe.Model, int, int, nnx.Rngs], nnx.Module]
MODELS: Registry[Builder] = Registry(
    "model",
    {name: functools.partial(resnet.build_resnet, name) for name in resnet.DEPTHS}
    | {"cifarnet": cifarnet.build_cifarnet}
    | {name: functools.partial(vit.build_vit, name) for name in vit.SIZES}
    | {name: functools.partial(efficientnet.build_efficientnet, name) for name in efficientnet.SIZES}
    | {name: functools.partial(convnext.build_convnext, name) for name in convnext.SIZES},
)

# Fields of a recipe's model section that only some networks have, by what their names start with.
_FIELDS = MappingProxyType(
    {
        "stem": ("resnet", "cifarnet"),
        "width": ("resnet", "cifarnet"),
        "activation": ("cifarnet",),
        "patch": ("vit",),
        "pooling": ("vit",),
        "positions": ("vit",),
        "padding": ("efficientnet",),
        "norm_epsilon": ("efficientnet",),
        "dropout": ("vit", "efficientnet", "convnext"),
        "drop_path": ("vit", "efficientnet", "convnext"),
        "remat": ("resnet", "vit", "efficientnet", "convnext"),
    }
)
_BUILT_IN = frozenset(MODELS)


def list_models() -> list[str]:
    """Return the names that `model.name` of a recipe may take.

    >>> list_models()[:3]
    ['resnet8', 'resnet18', 'resnet34']
    """
    return list(MODELS)


def register_model(name: str) -> Callable[[Builder], Builder]:
    """Return a decorator that makes a builder available to recipes under `name`.

    Args:
        name: what `model.name` of a recipe says.

    Returns:
        a decorator that registers the builder and returns it unchanged.

    Raises:
        UserError: there is already a model of this name.

    Examples:
        >>> @register_model("linear")
        ... def linear(config, classes, image_size, rngs):
        ...     flatten = lambda images: images.reshape(len(images), -1)
        ...     return nnx.Sequential(flatten, nnx.Linear(3 * image_size**2, classes, rngs=rngs))
        >>> model = build_model(recipe.Model(name="linear"), classes=10, image_size=8)
        >>> model(jax.numpy.ones((2, 8, 8, 3))).shape
        (2, 10)
        >>> unregister_model("linear")
    """

    def add(builder: Builder) -> Builder:
        if name in MODELS:
            raise UserError(f"there is already a model {name!r}; choose another name, or unregister that one first")
        MODELS.add(name, builder)
        return builder

    return add


def unregister_model(name: str) -> None:
    """Forget a name; nothing happens if it is unknown."""
    MODELS.remove(name)


def locate_builder(name: str) -> str:
    """Return the file in which a user's builder was defined; empty for the networks that ship with Podscale."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(MODELS[name])) or ""
    except (UserError, TypeError):  # unknown, or a built-in network's partial function
        return ""
    return "" if Path(path).is_relative_to(Path(__file__).parent) else path


def build_model(config: recipe.Model, classes: int, image_size: int, seed: int | jax.Array = 0) -> nnx.Module:
    """Return the network that `config` names, with random weights from `seed`, a number or a random key.

    Raises:
        UserError: there is no such network, or it cannot have these classes, images or this precision.
    """
    if config.name not in MODELS:
        hint = suggest_names(config.name, MODELS)
        hint = hint if hint.endswith("?") else f"{hint};"
        raise UserError(f"there is no model {config.name!r}: {hint} --import FILE.py loads your own")
    if classes < 1:
        raise UserError(f"a model needs at least one class, not {classes}")
    if config.precision == "float64" and not jax.config.read("jax_enable_x64"):
        raise UserError("model.precision float64 needs JAX's 64-bit mode: set JAX_ENABLE_X64=1 in the environment")
    if config.name in _BUILT_IN:
        _check_fields(config)
    return MODELS[config.name](config, classes, image_size, nnx.Rngs(seed))


def _check_fields(config: recipe.Model) -> None:
    """Refuse fields that the model does not have, unless they are at their defaults."""
    wrong = {
        field: getattr(recipe.Model, field)
        for field, families in _FIELDS.items()
        if not config.name.startswith(families) and getattr(config, field) != getattr(recipe.Model, field)
    }
    if wrong:
        missing = " and ".join(f"no model.{field} (which is for {' and '.join(_FIELDS[field])})" for field in wrong)
        reset = " ".join(f"--model.{field} {str(default).lower()}" for field, default in wrong.items())
        raise UserError(f"{config.name} has {missing}; reset {'it' if len(wrong) == 1 else 'them'} with {reset}")
