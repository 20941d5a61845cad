"""Podscale: train image classifiers at supercomputer scale, and on one machine, with the same recipe.

    import podscale

    recipe = podscale.load_recipe("digits").override({"train.epochs": 2})
    summary = podscale.train(recipe, pod=podscale.find_pod(virtual="2x2"))

Names are imported when they are first used, so that `import podscale` does not import JAX.
"""

import importlib
from typing import Any

_HOMES = {
    "Recipe": "podscale.recipe",
    "load_recipe": "podscale.recipe:load",
    "presets": "podscale.recipe",
    "Pod": "podscale.pod",
    "find_pod": "podscale.pod:find",
    "named_pod": "podscale.pod:named",
    "Plan": "podscale.plan",
    "Options": "podscale.options",
    "planned": "podscale.memory",
    "Run": "podscale.run",
    "Until": "podscale.until",
    "Event": "podscale.events",
    "evaluate": "podscale.inference",
    "predict": "podscale.inference",
    "restore": "podscale.inference",
    "register": "podscale.models",
    "BatchNorm": "podscale.norm",
    "load_torchvision": "podscale.models.torchvision",
    "to_torchvision": "podscale.models.torchvision",
    "UserError": "podscale.errors",
}

_VERBS = ("train", "export")  # each is a room and a verb: the module can be called

__all__ = [*_VERBS, *_HOMES]  # noqa: PLE0604 (all of them are strings)


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return importlib.import_module(f"podscale.{name}")
    if name not in _HOMES:
        raise AttributeError(f"podscale has no {name!r}")
    module, _, original = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), original or name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
