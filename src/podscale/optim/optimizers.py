"""From a recipe to an update: learning-rate schedules and optimizers, as optax transformations.

LARS (You, Gitman, Ginsburg 2017, arXiv 1708.03888, section 4) gives every layer a learning rate of its own, in
proportion to ‖w‖/‖g‖, the *trust ratio*. Its published forms differ in where the trust ratio, the weight decay and
the learning rate meet the momentum; with g the gradient, w the weights, β weight decay, μ momentum, η `trust`:

    mlperf   v ← μv + lr·trust·(g + βw)    w ← w − v             trust = η‖w‖ / (‖g‖ + β‖w‖ + ε)
    scaled   m ← μm + g                    w ← w − lr·trust·m    the same trust; β occurs nowhere else
    optax    v ← μv + lr·trust·(g + βw)    w ← w − v             trust = η‖w‖ / (‖g + βw‖ + ε)

`mlperf` is algorithm 1 of the paper and the form of MLPerf's reference; `scaled` is that of TensorFlow's first
implementation. But for weight decay they agree while learning rate and trust ratio stand still: in `mlperf` the
momentum remembers the rates it was made with, in `scaled` a new rate acts on all of it at once. The trust ratio is 1
where ‖w‖ or ‖g‖ is 0 (`optax`: where ‖w‖ or ‖g + βw‖ is 0).

Parameters whose last name is in `optimizer.skip` (biases and batch-norm scales) have neither weight decay nor trust
ratio: the plain learning rate, with momentum.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) moves every convolution's kernel, as a matrix, along the
nearest orthogonal matrix to its momentum, so that all of its directions learn at the same rate. Here the step is a
share of the kernel's own norm, as in LARS: w ← w − lr·(η‖w‖/‖O‖·O + βw). All else learns by SGD. With `renormalize`,
as its author trains small networks in seconds, w ← √outputs/‖w‖·w − lr·η·O: a kernel keeps its norm, and moves less
along directions that Newton and Schulz's steps have not brought to full length.

Biases, the head and the first layer may have learning rates of their own (`schedule.bias_peak` and so on).
"""

from collections.abc import Callable
from functools import partial

import optax

from podscale.config.fields import add_choice
from podscale.errors import UserError
from podscale.optim.adamw import make_adamw
from podscale.optim.lars import make_lars
from podscale.optim.muon import make_fallback, make_muon
from podscale.optim.norms import Norms, clip_by_global_norm, whole_norms
from podscale.optim.parameter_groups import REST, group_rates, label_groups
from podscale.optim.sgd import make_sgd
from podscale.recipe import Optimizer, Recipe

# --- optimizers --------------------------------------------------------------------------------------------------


def make_optimizer(
    recipe: Recipe,
    learning_rate: optax.ScalarOrSchedule,
    norms: Norms = whole_norms,
    *,
    stem: str = "",
    head: str = "",
) -> optax.GradientTransformation:
    """The recipe's update rule. Its state is a tree of arrays; momentum has the shape and dtype of its parameter.

    `norms` replaces the one thing that an update rule here does with an array as a whole. `stem` and `head` are where
    the model's first and last layers stand among the parameters, such as `layers.0`.
    """
    wanted, rates = recipe.optimizer, group_rates(recipe, learning_rate, stem, head)
    rules = {kind: _make_rule(wanted, kind, rate, norms) for kind, rate in rates.items()}
    rule = (
        rules[REST]
        if len(rules) == 1
        else optax.partition(rules, partial(label_groups, wanted, set(rules), stem, head))
    )
    return optax.chain(clip_by_global_norm(wanted.clip_norm, norms), rule) if wanted.clip_norm else rule


def _make_rule(
    wanted: Optimizer, kind: str, rate: optax.ScalarOrSchedule, norms: Norms
) -> optax.GradientTransformation:
    """The update rule for parameters of one kind."""
    match wanted.name:
        case "lars":
            return make_lars(wanted, rate, norms)
        case "sgd":
            return make_sgd(wanted, rate)
        case "adamw":
            return make_adamw(wanted, rate)
        case "muon" if norms is whole_norms:
            return make_muon(wanted, rate) if kind.startswith(REST) else make_fallback(wanted, rate)
        case name:
            if norms is not whole_norms:
                raise UserError(f"plan.summation sharded gives every device a part of each array; {name} may need all")
            return RULES[name](wanted, rate)


BUILT_IN = ("lars", "sgd", "adamw", "muon")
Rule = Callable[[Optimizer, optax.ScalarOrSchedule], optax.GradientTransformation]


def register(name: str) -> Callable[[Rule], Rule]:
    """Makes the decorated rule available to recipes under `name`: from the recipe's section and the learning rate, a
    transformation whose state is a tree of arrays."""

    def add(rule: Rule) -> Rule:
        if name in RULES or name in BUILT_IN:
            raise UserError(f"there is already an optimizer {name!r}; choose another name")
        RULES[name] = rule
        add_choice("optimizer.name", name)
        return rule

    return add


RULES: dict[str, Rule] = {}  # those that were registered
