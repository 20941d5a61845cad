"""Initial values depend on their key alone: not on how they are put together, and the same inside of a trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podscale import recipe
from podscale.models import initializers, registry


@pytest.mark.parametrize("shape", [(3,), (513, 513), (3, 3, 512, 512)])  # one, two and ten chunks
def test_values_are_chunks_of_the_keys_that_a_split_gives(shape):
    key, count = jax.random.key(1), int(np.prod(shape))
    keys = jax.random.split(key, -(-count // initializers._CHUNK))
    expected = np.concatenate([jax.random.normal(k, (initializers._CHUNK,)) for k in keys])[:count]
    values = initializers.normal(0.5)(key, shape, jnp.float32)
    np.testing.assert_array_equal(values, expected.reshape(shape) * np.float32(0.5))


@pytest.mark.parametrize("shape", [(2**30 + 1,), (2**16, 2**15)])
def test_arrays_with_more_values_than_there_are_keys_are_refused(shape):
    key = jax.random.key(1)
    with pytest.raises(ValueError, match=r"values; at most 1,073,741,824 are sampled"):
        initializers.normal(0.5)(key, shape, jnp.float32)
    with pytest.raises(ValueError, match=r"values; at most 1,073,741,824 are sampled"):
        jax.eval_shape(lambda key: initializers.normal(0.5)(key, shape, jnp.float32), key)


def test_a_trace_gives_the_same_values():
    initialize = initializers.uniform(0.1)
    inside = jax.jit(lambda key: initialize(key, (600, 700), jnp.float32))(jax.random.key(2))
    np.testing.assert_allclose(inside, initialize(jax.random.key(2), (600, 700), jnp.float32), rtol=1e-6)
    assert float(jnp.abs(inside).max()) <= 0.1


def test_networks_of_another_width_are_made_without_compiling_a_program(caplog):
    """On GPUs each program takes a tenth of a second at every first start, and each shape would need one."""
    registry.build_model(recipe.Model(name="resnet18", width=8), 10, 32)
    with jax.log_compiles():
        registry.build_model(recipe.Model(name="resnet18", width=11), 7, 32)
    assert [record.message for record in caplog.records if "XLA compilation" in record.message] == []
