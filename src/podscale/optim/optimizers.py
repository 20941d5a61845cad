"""Optimizers by name: from the recipe's section `optimizer` to an optax transformation.

LARS, SGD, AdamW, Muon and RMSProp are built in; `register_optimizer` adds others.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import optax

from podscale.config.fields import add_choice
from podscale.config.registry import Registry
from podscale.errors import UserError
from podscale.optim.adamw import make_adamw
from podscale.optim.lars import make_lars
from podscale.optim.layer_decay import scale_by_layer
from podscale.optim.muon import Sharing, make_fallback, make_muon
from podscale.optim.norms import Norms, clip_by_global_norm, compute_norms
from podscale.optim.parameter_groups import DEFAULT, label_groups, make_group_rates
from podscale.optim.rmsprop import make_rmsprop
from podscale.optim.sgd import make_sgd
from podscale.recipe import Optimizer, Recipe

Rule = Callable[[Optimizer, optax.ScalarOrSchedule], optax.GradientTransformation]
BUILT_IN_NAMES = ("lars", "sgd", "adamw", "muon", "rmsprop")
ELEMENTWISE_RULES: Mapping[str, Rule] = MappingProxyType(
    {"sgd": make_sgd, "adamw": make_adamw, "rmsprop": make_rmsprop}
)
RULES: Registry[Rule] = Registry("optimizer")  # registered rules


def make_optimizer(
    recipe: Recipe,
    learning_rate: optax.ScalarOrSchedule,
    norms: Norms | None = None,
    *,
    stem: str = "",
    head: str = "",
    sharing: Sharing | None = None,
) -> optax.GradientTransformation:
    """Return the recipe's update rule.

    Args:
        recipe: its section `optimizer` names the rule and its settings.
        learning_rate: a number, or a function of the step.
        norms: the norms of whole arrays, from the part of each that a device holds; None: devices hold whole arrays.
        stem: path of the model's first layer among the parameters, such as `layers.0`.
        head: path of the model's last layer.
        sharing: how devices share work on whole matrices, which Muon needs; None: each device does it all.

    Returns:
        a transformation whose state is a tree of arrays; momentum has the shape and dtype of its parameter.
    """
    settings, rates = recipe.optimizer, make_group_rates(recipe, learning_rate, stem, head)
    make_muon_rule = partial(
        make_muon, settings, precision=recipe.model.precision, head=head, norms=norms, sharing=sharing
    )
    rules = {group: _make_rule(recipe, group, rate, norms, make_muon_rule) for group, rate in rates.items()}
    if len(rules) == 1:
        rule = rules[DEFAULT]
    else:
        rule = optax.partition(rules, partial(label_groups, settings, set(rules), stem, head))
    if recipe.schedule.layer_decay != 1:
        rule = optax.chain(rule, scale_by_layer(recipe.schedule.layer_decay))
    return (
        optax.chain(clip_by_global_norm(settings.clip_norm, norms or compute_norms), rule)
        if settings.clip_norm
        else rule
    )


def _make_rule(
    recipe: Recipe,
    group: str,
    rate: optax.ScalarOrSchedule,
    norms: Norms | None,
    make_muon_rule: Callable[[optax.ScalarOrSchedule], optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Return the update rule for one group of parameters."""
    settings = recipe.optimizer
    match settings.name:
        case "lars":
            return make_lars(settings, rate, norms or compute_norms)
        case name if name in ELEMENTWISE_RULES:
            return ELEMENTWISE_RULES[name](settings, rate)
        case "muon":
            return make_muon_rule(rate) if group.startswith(DEFAULT) else make_fallback(settings, rate)
        case name:
            if norms is not None:
                raise UserError(f"plan.summation sharded gives every device a part of each array; {name} may need all")
            return RULES[name](settings, rate)


def can_shard(recipe: Recipe) -> bool:
    """Return whether the recipe's optimizer can update a part of each array: `plan.summation sharded` needs that.

    All built-in rules can, given the norms of whole arrays and, for Muon, a share of the matrices.

    >>> from podscale.recipe import load_recipe
    >>> can_shard(load_recipe("resnet50-imagenet-32k"))
    True
    """
    return recipe.optimizer.name in BUILT_IN_NAMES


def register_optimizer(name: str) -> Callable[[Rule], Rule]:
    """Return a decorator that makes an update rule available to recipes under `name`.

    The decorated function takes the recipe's section `optimizer` and the learning rate, and returns an optax
    transformation whose state is a tree of arrays.

    Raises:
        UserError: there is already an optimizer of this name.
    """

    def add(rule: Rule) -> Rule:
        if name in RULES or name in BUILT_IN_NAMES:
            raise UserError(f"there is already an optimizer {name!r}; choose another name")
        RULES.add(name, rule)
        add_choice("optimizer.name", name)
        return rule

    return add
