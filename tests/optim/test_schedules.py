"""Learning-rate schedules against their written-out arithmetic."""

import jax
import numpy as np
import pytest
from support.updates import assert_close

from podscale.optim import schedules
from podscale.recipe import Recipe, override_recipe


def compute_rates(at, steps=100, steps_per_epoch=10.0, size=128, **fields):
    changes = {f"schedule.{key}": value for key, value in fields.items()} | {"batch.size": size}
    rate = schedules.make_schedule(override_recipe(Recipe(), changes), steps, steps_per_epoch)
    return [float(jax.jit(rate)(step)) for step in at]


def test_polynomial_decay_runs_from_the_end_of_warmup_to_the_end():
    settings = {"peak": 8.0, "warmup_epochs": 2.0, "decay": "polynomial", "power": 2.0, "end": 0.5}
    middle = 0.5 + 7.5 * 0.5**2
    assert_close(compute_rates((0, 5, 20, 60, 100, 1000), **settings), [0, 2, 8, middle, 0.5, 0.5])


def test_cosine_decay_runs_from_peak_to_end():
    settings = {"peak": 8.0, "warmup_epochs": 2.0, "decay": "cosine", "end": 1.0}
    quarter = 1 + 7 * (1 + 0.5**0.5) / 2
    assert_close(compute_rates((0, 20, 40, 60, 100), **settings), [0, 8, quarter, 4.5, 1])


def test_step_decay_multiplies_at_each_milestone():
    settings = {"peak": 4.0, "warmup_epochs": 1.0, "decay": "step", "milestones": [3.0, 6.0], "factor": 0.5}
    assert_close(compute_rates((0, 5, 10, 29, 30, 59, 60, 100), **settings), [0, 2, 4, 4, 2, 2, 1, 1])


def test_exponential_decay_multiplies_again_and_again_counted_from_the_start():
    settings = {"peak": 4.0, "warmup_epochs": 1.0, "decay": "exponential", "decay_epochs": 2.0, "factor": 0.5}
    assert_close(compute_rates((0, 5, 10, 19, 20, 39, 40, 100), **settings), [0, 2, 4, 4, 2, 2, 1, 4 / 32])


def test_constant_rate_without_warmup():
    assert_close(compute_rates((0, 50, 100), peak=3.0, decay="constant"), [3, 3, 3])


def test_warmup_may_end_between_two_steps():
    assert_close(compute_rates((0, 2, 3), peak=5.0, warmup_epochs=0.25, decay="constant"), [0, 4, 5])


def test_training_that_is_all_warmup_only_rises():
    assert_close(compute_rates((0, 50, 99), peak=1.0, warmup_epochs=10.0), [0, 0.5, 0.99])


def test_peak_scales_linearly_with_the_batch():
    """Goyal et al. 2017: 0.1 for 256 images makes 3.2 for 8192."""
    settings = {"peak": 0.1, "scale_batch": 256, "warmup_epochs": 5.0, "decay": "step"}
    assert_close(compute_rates((0, 25, 50), size=8192, **settings), [0, 1.6, 3.2])


@pytest.mark.parametrize(
    ("batch", "peak", "warmup", "epochs"), [(4096, 10.0, 5, 60), (32768, 31.2, 25, 72), (65536, 24.7, 31, 88)]
)
def test_published_schedules_peak_after_warmup_and_end_at_1e_4(batch, peak, warmup, epochs):
    steps_per_epoch = 1281167 / batch
    steps, top = int(np.ceil(epochs * steps_per_epoch)), warmup * steps_per_epoch
    settings = {"peak": peak, "warmup_epochs": float(warmup), "power": 2.0, "end": 1e-4}
    at = (0, top / 2, top, steps)
    assert_close(compute_rates(at, steps, steps_per_epoch, batch, **settings), [0, peak / 2, peak, 1e-4])
    before, after = compute_rates((int(top), int(top) + 1), steps, steps_per_epoch, batch, **settings)
    assert 0.98 * peak < min(before, after) <= max(before, after) <= peak * (1 + 1e-6)
