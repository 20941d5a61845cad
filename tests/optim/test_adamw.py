"""AdamW against its recurrence."""

import jax
import numpy as np
from support.updates import (
    GRADIENTS,
    PARAMS,
    RATES,
    assert_close,
    make_arrays,
    make_recipe,
    run_updates,
    select_parameter,
)


def test_adamw_follows_its_recurrence():
    after = run_updates(make_recipe(name="adamw", momentum=0.9, second_moment=0.99, epsilon=1e-3, weight_decay=0.1))
    for name, decay in (("kernel", 0.1), ("bias", 0.0)):
        w, m, v, expected = np.array([3.0, 4.0]), np.zeros(2), np.zeros(2), []
        for t, (rate, g) in enumerate(zip(RATES, select_parameter(GRADIENTS, "conv", name), strict=True), start=1):
            m = 0.9 * m + 0.1 * g
            v = 0.99 * v + 0.01 * g**2
            w = w - rate * (m / (1 - 0.9**t) / ((v / (1 - 0.99**t)) ** 0.5 + 1e-3) + decay * w)
            expected.append(w)
        assert_close(select_parameter(after, "conv", name), expected)


def test_zero_gradient_without_epsilon_is_finite():
    zeros = jax.tree.map(lambda x: 0 * x, make_arrays(PARAMS))
    after = run_updates(make_recipe(name="adamw", epsilon=0.0, weight_decay=0.0), gradients=[zeros])
    assert_close(after[0]["conv"]["kernel"], [3, 4])
