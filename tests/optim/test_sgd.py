"""SGD against its recurrence."""

import numpy as np
import pytest
from support.updates import GRADIENTS, RATES, assert_close, make_recipe, run_updates, select_parameter


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_follows_the_recurrence_of_pytorch(nesterov):
    after = run_updates(make_recipe(name="sgd", nesterov=nesterov, momentum=0.9, weight_decay=0.1))
    for name, decay in (("kernel", 0.1), ("bias", 0.0)):
        w, v, expected = np.array([3.0, 4.0]), np.zeros(2), []
        for rate, g in zip(RATES, select_parameter(GRADIENTS, "conv", name), strict=True):
            d = g + decay * w
            v = 0.9 * v + d
            w = w - rate * (d + 0.9 * v if nesterov else v)
            expected.append(w)
        assert_close(select_parameter(after, "conv", name), expected)
