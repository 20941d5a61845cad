"""Selecting between two states, array by array and with short vectors joined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podscale.training.selection import MAX_LENGTH, VECTORS_PER_GROUP, select

SHAPES = [(), (3, 4), (MAX_LENGTH + 1,), (0,), *[(size,) for size in range(1, 3 * VECTORS_PER_GROUP)]]


def draw_state(seed):
    random = np.random.default_rng(seed)
    arrays = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in SHAPES]
    return {"params": arrays, "stats": {"mean": jnp.full(5, seed, jnp.bfloat16)}, "counts": jnp.array([seed, 7])}


@pytest.mark.parametrize("condition", [True, False])
def test_joined_vectors_are_selected_as_single_ones(condition):
    new, old = draw_state(1), draw_state(2)
    selected = jax.jit(lambda *trees: select(jnp.array(condition), *trees, joins_vectors=True))(new, old)
    alone = select(jnp.array(condition), new, old, joins_vectors=False)
    for expected in (alone, new if condition else old):
        assert jax.tree.structure(selected) == jax.tree.structure(expected)
        for ours, theirs in zip(jax.tree.leaves(selected), jax.tree.leaves(expected), strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(ours, theirs)


def test_non_finite_values_that_are_not_selected_stay_out():
    new, old = {"scale": jnp.array([np.nan, 1.0]), "bias": jnp.ones(2)}, {"scale": jnp.ones(2), "bias": jnp.zeros(2)}
    selected = select(jnp.array(False), new, old, joins_vectors=True)
    np.testing.assert_array_equal(selected["scale"], 1)


def test_vectors_are_joined_only_where_asked_for_and_only_short_ones_of_one_type():
    state = {"a": jnp.ones(3), "b": jnp.ones(5), "c": jnp.ones(3, jnp.bfloat16), "long": jnp.ones(MAX_LENGTH + 1)}

    def count_selections(joins_vectors):
        program = jax.make_jaxpr(lambda new, old: select(True, new, old, joins_vectors=joins_vectors))(state, state)
        return str(program).count("select_n")

    assert (count_selections(False), count_selections(True)) == (4, 3)
