"""AdamW: Adam with decoupled weight decay."""

import optax

from podscale.optim.parameter_groups import make_mask
from podscale.recipe import Optimizer


def make_adamw(settings: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Return AdamW; parameters in `settings.skip` have no weight decay."""
    return optax.adamw(
        learning_rate,
        b1=settings.momentum,
        b2=settings.second_moment,
        eps=settings.epsilon or 1e-8,  # with 0, a parameter that has had no gradient yet would become 0/0
        weight_decay=settings.weight_decay,
        mask=make_mask(settings),
        nesterov=settings.nesterov,
    )
