"""A bit that flips in the memory of one device is detected, reported, and undone by rolling back to a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from podscale import pod
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.runs.folder import Run
from podscale.training import loop
from podscale.training.replicas import ReplicaCheck, ReplicaMismatchError


def flip_bit(array, device, bit=0):
    """Return the replicated array with one bit of its first number flipped in the copy of one device."""
    copies = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << bit)
        copies.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies)


@pytest.fixture
def mesh():
    return pod.make_pod(jax.devices(), "2x2").mesh((1, 2))


def replicate(mesh, *arrays):
    return [jax.device_put(a, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())) for a in arrays]


@pytest.mark.parametrize("bit", [0, 7, 31])
@pytest.mark.parametrize("number", [0, 3])
def test_the_device_that_differs_is_named(mesh, bit, number):
    arrays = replicate(mesh, jnp.arange(50.0), jnp.ones((3, 4), jnp.int32))
    replicas = ReplicaCheck(mesh, every=10)
    replicas.check(10, arrays)
    device = mesh.devices.flat[number]
    damaged = [flip_bit(arrays[0], device, bit), arrays[1]]
    replicas.check(19, damaged)  # not due
    with pytest.raises(ReplicaMismatchError, match=f"at step 20 the state of {device} differs from the other devices"):
        replicas.check(20, damaged)
    with pytest.raises(ReplicaMismatchError):
        replicas.check(21, damaged, now=True)


def test_without_a_majority_all_devices_are_named(mesh):
    (array,) = replicate(mesh, jnp.arange(8.0))
    for number in (0, 1):
        array = flip_bit(array, mesh.devices.flat[number])
    with pytest.raises(ReplicaMismatchError, match=", ".join(map(str, mesh.devices.flat))):
        ReplicaCheck(mesh, every=1).check(1, [array])


@pytest.fixture(scope="module")
def recipe():
    return recipes.override_recipe(
        recipes.load_recipe("digits"), {"model.width": 8, "train.epochs": 2, "train.eval_epochs": 1}
    )


def read_losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


def inject_bit_flips(monkeypatch, at, times):
    """Flip a bit of one device's parameters before that step, in the first sessions of a run."""
    compile_train_step, remaining = loop.compile_train_step, [times]

    def compile_damaged(setup, run, **others):
        call = compile_train_step(setup, run, **others)

        def call_with_flipped_bit(state, *batch):
            if int(state.step) == at and remaining[0]:
                remaining[0] -= 1
                name = sorted(state.params)[0]
                first = jax.tree.leaves(state.params[name])[0]
                damaged_array = flip_bit(first, setup.mesh.devices.flat[1])
                params = jax.tree.map(lambda a: damaged_array if a is first else a, state.params)
                state = state._replace(params=params)
            return call(state, *batch)

        return call_with_flipped_bit

    monkeypatch.setattr(loop, "compile_train_step", compile_damaged)


def test_a_run_rolls_back_to_its_checkpoint_and_ends_bit_identical(recipe, tmp_path, monkeypatch, capsys):
    torus, options = pod.make_pod(jax.devices(), "2x2"), Options(check_steps=4)
    loop.train(recipe, pod=torus, options=options, folder=tmp_path / "whole", console=Console(quiet=True))
    inject_bit_flips(monkeypatch, at=17, times=1)
    loop.train(recipe, pod=torus, options=options, folder=tmp_path / "damaged", console=Console(width=300))
    output = capsys.readouterr().out
    assert "differs from the other devices; rolling back to the last checkpoint" in output
    assert "resuming after step 12" in output
    assert read_losses(tmp_path / "damaged") == read_losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_device_that_fails_repeatedly_ends_the_run(recipe, tmp_path, monkeypatch):
    inject_bit_flips(monkeypatch, at=2, times=100)
    with pytest.raises(UserError, match="again after a rollback"):
        loop.train(
            recipe,
            pod=pod.make_pod(jax.devices(), "2x2"),
            options=Options(check_steps=4),
            folder=tmp_path,
            console=Console(quiet=True),
        )
