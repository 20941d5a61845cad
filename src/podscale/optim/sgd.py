"""SGD with momentum, optionally Nesterov's, and weight decay."""

import optax

from podscale.optim.parameter_groups import make_mask
from podscale.recipe import Optimizer


def make_sgd(settings: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Return SGD: v ← μv + g + βw, w ← w − lr·v; parameters in `settings.skip` have no weight decay β."""
    return optax.chain(
        optax.add_decayed_weights(settings.weight_decay, make_mask(settings)),
        optax.sgd(learning_rate, settings.momentum, settings.nesterov),
    )
