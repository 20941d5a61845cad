"""AdamW."""

import optax

from podscale.optim.parameter_groups import make_mask
from podscale.recipe import Optimizer


def make_adamw(wanted: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    return optax.adamw(
        learning_rate,
        b1=wanted.momentum,
        b2=wanted.second_moment,
        eps=wanted.epsilon or 1e-8,  # with 0, a parameter that has had no gradient yet would become 0/0
        weight_decay=wanted.weight_decay,
        mask=make_mask(wanted),
        nesterov=wanted.nesterov,
    )
