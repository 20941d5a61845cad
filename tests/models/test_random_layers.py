"""Random layers: dropout, stochastic depth and layers of users' own follow from keys alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podscale.errors import UserError
from podscale.models.functional import make_functional
from podscale.models.random_layers import Dropout, DropPath, KeySource, RandomLayer
from podscale.parallel.batch_norm import Groups

KEYS = jax.random.split(jax.random.key(0), 400)


def apply(layer, x, keys=KEYS, path="layers.1"):
    layer.train()
    layer.path, layer.source = path, KeySource(keys)
    return layer(x)


def test_dropout_sets_a_share_to_zero_and_keeps_the_mean():
    y = np.asarray(apply(Dropout(0.25), jnp.ones((400, 50))))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert (y == 0).mean() == pytest.approx(0.25, abs=0.01)
    assert y.mean() == pytest.approx(1, abs=0.01)


def test_drop_path_drops_whole_images():
    y = np.asarray(apply(DropPath(0.5), jnp.ones((400, 3, 2))))
    per_image = y.reshape(400, -1)
    assert (per_image == per_image[:, :1]).all()
    assert (per_image[:, 0] == 0).mean() == pytest.approx(0.5, abs=0.08)


def test_choices_follow_the_image_and_differ_between_layers_and_keys():
    x = jnp.ones((400, 50))
    whole = apply(Dropout(0.5), x)
    np.testing.assert_array_equal(apply(Dropout(0.5), x[100:200], KEYS[100:200]), whole[100:200])
    assert not np.array_equal(apply(Dropout(0.5), x, path="layers.2"), whole)
    assert not np.array_equal(apply(Dropout(0.5), x, KEYS[::-1]), whole)


def test_nothing_is_dropped_in_evaluation_without_keys_or_at_rate_zero():
    x = jnp.ones((400, 50))
    layer = Dropout(0.5)
    layer.source = KeySource(KEYS)
    np.testing.assert_array_equal(layer(x), x)  # evaluation
    layer.train()
    layer.source = None
    np.testing.assert_array_equal(layer(x), x)
    np.testing.assert_array_equal(apply(Dropout(0.0), x), x)


def test_float64_drops_the_same():
    narrow = np.asarray(apply(Dropout(0.5), jnp.ones((400, 50))))
    with jax.enable_x64(True):
        wide = np.asarray(apply(Dropout(0.5), jnp.ones((400, 50), jnp.float64)))
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(narrow, wide)


class UsersModel(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(12, 6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, broadcast_dims=(1,), rngs=rngs)

    def __call__(self, images):
        x = images.reshape(len(images), -1)
        for layer in self.layers:
            x = layer(x)
        return self.dropout(x)


@pytest.mark.heavy
def test_dropouts_of_a_users_model_take_our_keys():
    net, params, stats = make_functional(UsersModel(nnx.Rngs(0)))
    images, keys = jnp.ones((400, 2, 2, 3)), KEYS
    assert net.is_random
    first = net.train(params, stats, images, Groups(), keys=keys)[0]
    np.testing.assert_array_equal(net.train(params, stats, images, Groups(), keys=keys)[0], first)
    assert not np.array_equal(net.train(params, stats, images, Groups(), keys=keys[::-1])[0], first)
    zero = np.asarray(first) == 0
    assert (zero.all(axis=1) == zero.any(axis=1)).all()  # one choice for all classes
    assert len(np.unique(np.asarray(net.evaluate(params, stats, images)), axis=0)) == 1


def test_a_model_that_keeps_random_state_of_its_own_is_refused_with_what_to_do():
    model = UsersModel(nnx.Rngs(0))
    model.rngs = nnx.Rngs(1)
    with pytest.raises(UserError, match=r"a random layer derives from podscale\.models\.random_layers\.RandomLayer"):
        make_functional(model)


def test_one_choice_for_all_images_is_refused():
    with pytest.raises(UserError, match="leave axis 0 out of broadcast_dims"):
        Dropout(0.5, broadcast_dims=(0,))


def test_layers_without_random_ones_are_not_random():
    net, _, _ = make_functional(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    assert not net.is_random
    assert issubclass(Dropout, RandomLayer)
