"""Norms of many arrays together, and clipping by the global norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.updates import assert_close, make_recipe, run_updates

from podscale.optim import norms


@pytest.mark.parametrize(("limit", "step"), [(2.5, [1.5, 2.0]), (10.0, [3.0, 4.0])])
def test_gradients_are_clipped_to_the_global_norm(limit, step):
    recipe = make_recipe(name="sgd", clip_norm=limit, weight_decay=0.1, momentum=0.0)
    after = run_updates(recipe, 1.0, {"a": [0.0], "b": [0.0]}, [{"a": [3.0], "b": [4.0]}])
    assert_close([-after[0]["a"][0], -after[0]["b"][0]], step)


def test_norms_are_those_of_each_array_whatever_the_others_shapes():
    """Among more arrays than are summed together, of one to several blocks, empty ones and numbers."""
    random = np.random.default_rng(0)
    shapes = [(2, 3), (3, 3, 2, 129), (1, 1, 4, 128), (5, 300), (7,), (), (0, 3), *[(4, size) for size in range(1, 45)]]
    tree = {str(shape): random.normal(size=shape).astype(np.float32) for shape in shapes}
    for name, norm in jax.jit(norms.compute_norms)(tree).items():
        assert norm.dtype == jnp.float32
        np.testing.assert_allclose(norm, np.linalg.norm(tree[name].astype(np.float64)), rtol=1e-6)


def test_norms_as_a_gpu_computes_them_are_those_of_each_array():
    random = np.random.default_rng(0)
    shapes = [(3, 3, 64, 128), (32, 64), (7, 7, 3, 64), (2, 512), (1, 1, 256, 1024), (0, 3), (5, 7)]
    arrays = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    sums = jax.jit(norms._sum_squares_by_rows)(*arrays)
    expected = [np.square(array.astype(np.float64)).sum() for array in arrays]
    np.testing.assert_allclose(sums, expected, rtol=1e-6)


def test_norms_of_float64_are_in_float64():
    with jax.enable_x64(True):
        tree = {"wide": jnp.full((3, 200), 1 + 1e-12), "narrow": jnp.ones((3, 200), jnp.float32)}
        results = norms.compute_norms(tree)
        assert {name: norm.dtype.name for name, norm in results.items()} == {"wide": "float64", "narrow": "float32"}
        np.testing.assert_allclose(results["wide"] - np.sqrt(600), 1e-12 * np.sqrt(600), rtol=1e-2)


def test_norms_of_a_tree_without_arrays():
    assert norms.compute_norms({}) == {}
