"""Clipping by the global norm."""

import pytest
from support.updates import assert_close, make_recipe, run_updates


@pytest.mark.parametrize(("limit", "step"), [(2.5, [1.5, 2.0]), (10.0, [3.0, 4.0])])
def test_gradients_are_clipped_to_the_global_norm(limit, step):
    recipe = make_recipe(name="sgd", clip_norm=limit, weight_decay=0.1, momentum=0.0)
    after = run_updates(recipe, 1.0, {"a": [0.0], "b": [0.0]}, [{"a": [3.0], "b": [4.0]}])
    assert_close([-after[0]["a"][0], -after[0]["b"][0]], step)
