"""Losses against torch's formulas, written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podscale.errors import UserError
from podscale.recipe import Train
from podscale.training.losses import compute_losses

RNG = np.random.default_rng(0)
LOGITS, TARGETS = RNG.normal(size=(4, 3)), RNG.dirichlet(np.ones(3), size=4)
WEIGHTS = (0.5, 1.0, 2.0)


@pytest.mark.parametrize("weights", [(), WEIGHTS])
@pytest.mark.parametrize("loss", ["softmax", "binary"])
def test_losses_are_the_published_formulas(loss, weights):
    factors = np.array(weights or (1.0, 1.0, 1.0))
    if loss == "softmax":
        p = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
        expected = -(factors * TARGETS * np.log(p)).sum(1)
    else:
        p = 1 / (1 + np.exp(-LOGITS))
        expected = -(factors * (TARGETS * np.log(p) + (1 - TARGETS) * np.log(1 - p))).mean(1)
    with jax.enable_x64(True):
        losses = compute_losses(Train(loss=loss, class_weights=weights), jnp.asarray(LOGITS), jnp.asarray(TARGETS))
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_another_number_of_weights_than_classes_is_refused():
    with pytest.raises(UserError, match=r"train\.class_weights has 2 numbers for 3 classes"):
        compute_losses(Train(class_weights=(1.0, 2.0)), jnp.asarray(LOGITS), jnp.asarray(TARGETS))
