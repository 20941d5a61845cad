"""SGD with momentum and weight decay."""

import optax

from podscale.optim.parameter_groups import make_mask
from podscale.recipe import Optimizer


def make_sgd(wanted: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(wanted.weight_decay, make_mask(wanted)),
        optax.sgd(learning_rate, wanted.momentum, wanted.nesterov),
    )
