"""RMSProp in TensorFlow's form, by which EfficientNets were trained.

With g the gradient plus weight decay, ρ `second_moment`, μ `momentum`, ε `epsilon`:

    s ← ρs + (1 − ρ)g²    v ← μv + lr·g/√(s + ε)    w ← w − v

s starts at 1. ε stands inside the root and the learning rate inside the momentum, unlike in torch.

Reference:
    Tieleman and Hinton 2012, lecture 6.5; Tan and Le 2019, arXiv 1905.11946, section 5.2 (decay 0.9, momentum 0.9,
    weight decay 1e-5; their code has ε = 1e-3).
"""

import optax

from podscale.optim.parameter_groups import make_mask
from podscale.recipe import Optimizer

DEFAULT_EPSILON = 1e-3


def make_rmsprop(settings: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Return RMSProp; parameters in `settings.skip` have no weight decay."""
    return optax.chain(
        optax.add_decayed_weights(settings.weight_decay, make_mask(settings)),
        optax.scale_by_rms(settings.second_moment, settings.epsilon or DEFAULT_EPSILON, initial_scale=1.0),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(settings.momentum, settings.nesterov),
    )
