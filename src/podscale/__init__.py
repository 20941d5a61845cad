"""Podscale: train image classifiers at supercomputer scale, and on one machine, with the same recipe.

    import podscale

    recipe = podscale.load_recipe("digits").override({"train.epochs": 2})
    summary = podscale.train(recipe, pod=podscale.find_pod(virtual="2x2"))

Names are imported when they are first used, so that `import podscale` does not import JAX.
"""

import importlib
from types import MappingProxyType
from typing import Any

# Each public name, and the module that defines it, with the original name where that is another.
_MODULES = MappingProxyType(
    {
        "Recipe": "podscale.recipe",
        "load_recipe": "podscale.recipe",
        "list_presets": "podscale.recipe",
        "Pod": "podscale.pod",
        "find_pod": "podscale.pod",
        "parse_pod": "podscale.pod",
        "Plan": "podscale.plan",
        "Options": "podscale.config.options",
        "make_plan": "podscale.training.setup:plan_recipe",
        "train": "podscale.training.loop",
        "enable_program_cache": "podscale.training.program_cache",
        "StopCondition": "podscale.config.stop_condition",
        "Event": "podscale.runs.events",
        "Run": "podscale.runs.folder",
        "evaluate": "podscale.export.inference",
        "predict": "podscale.export.inference",
        "load_model": "podscale.export.inference",
        "export_model": "podscale.export.write",
        "register_model": "podscale.models.registry",
        "BatchNorm": "podscale.parallel.batch_norm",
        "load_torchvision": "podscale.models.weights.torchvision",
        "to_torchvision": "podscale.models.weights.torchvision",
        "UserError": "podscale.errors",
    }
)
# Names of earlier versions.
_ALIASES = MappingProxyType(
    {
        "Until": "StopCondition",
        "presets": "list_presets",
        "planned": "make_plan",
        "named_pod": "parse_pod",
        "restore": "load_model",
        "register": "register_model",
    }
)
__all__ = [*_MODULES]  # noqa: PLE0604 (all of them are strings)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    public_name = _ALIASES.get(name, name)
    location = _MODULES.get(public_name)
    if location is None:
        raise AttributeError(f"podscale has no {name!r}")
    module, _, original = location.partition(":")
    return getattr(importlib.import_module(module), original or public_name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
