"""Sums that XLA's compiler for CPUs gets wrong without our options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podscale.plan import Counts
from podscale.pod import find_pod
from podscale.recipe import load_recipe
from podscale.training.compilation import compile_program
from podscale.training.cpu_options import make_cpu_options
from podscale.training.setup import resolve
from podscale.training.step import make_predictor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_after_two_operations_with_the_same_constant_is_right(dtype):
    x = jnp.full((64, 64), 2, dtype)
    np.testing.assert_array_equal(compile_for_cpus(lambda x: jnp.maximum(-jnp.maximum(x, 1), 1).sum(0), x)(x), 64)


def test_the_sums_of_many_products_are_each_in_their_own_row():
    x = jnp.zeros((32_769, 3)).at[:, 0].set(jnp.arange(32_769.0))
    compiled = compile_for_cpus(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)), x)
    np.testing.assert_array_equal(compiled(x), x[:, 0] ** 2)


def compile_for_cpus(function, x):
    return jax.jit(function).lower(x).compile(make_cpu_options())


@pytest.fixture(scope="module")
def program():
    fields = {"model.name": "resnet8", "model.stem": "small", "data.image_size": 16, "model.precision": "bfloat16"}
    return resolve(load_recipe("imagefolder").override(fields), find_pod(virtual="1x1"), Counts(128, 64, 10))


def test_a_resnet_in_bfloat16_is_evaluated_as_its_layers_one_by_one(program):
    evaluate, weights = program.net.evaluate, program.weights
    images = np.random.default_rng(0).standard_normal((2, 16, 16, 3), np.float32)
    compiled = compile_program(jax.jit(evaluate).lower(*weights, images), program.plan, None)
    np.testing.assert_allclose(compiled(*weights, images), evaluate(*weights, images), rtol=0, atol=1e-4)


def test_predictions_of_a_resnet_in_bfloat16_are_probabilities(program):
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    predict = make_predictor(program.net, program.plan.recipe, make_cpu_options())
    np.testing.assert_allclose(predict(*program.weights, images).sum(axis=1), 1, rtol=1e-5)
