"""A bit that flips in the memory of one device: found, named, and undone by going back to the last checkpoint."""

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


def flipped(array, device, bit=0):
    """The same replicated array, with one bit of its first number flipped in the copy of one device."""
    pieces = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << bit)
        pieces.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


@pytest.fixture
def mesh():
    return pod.of(jax.devices(), "2x2").mesh((1, 2))


def replicated(mesh, *arrays):
    return [jax.device_put(a, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())) for a in arrays]


@pytest.mark.parametrize("bit", [0, 7, 31])
@pytest.mark.parametrize("which", [0, 3])
def test_the_device_whose_copy_differs_is_named(mesh, bit, which):
    arrays = replicated(mesh, jnp.arange(50.0), jnp.ones((3, 4), jnp.int32))
    replicas = ReplicaCheck(mesh, every=10)
    replicas.check(10, arrays)
    device = mesh.devices.flat[which]
    harmed = [flipped(arrays[0], device, bit), arrays[1]]
    replicas.check(19, harmed)  # not due
    with pytest.raises(ReplicaMismatchError, match=f"at step 20 what {device} holds differs from the rest"):
        replicas.check(20, harmed)
    with pytest.raises(ReplicaMismatchError):
        replicas.check(21, harmed, now=True)


def test_without_a_majority_all_are_named(mesh):
    (array,) = replicated(mesh, jnp.arange(8.0))
    for which in (0, 1):
        array = flipped(array, mesh.devices.flat[which])
    with pytest.raises(ReplicaMismatchError, match=", ".join(map(str, mesh.devices.flat))):
        ReplicaCheck(mesh, every=1).check(1, [array])


@pytest.fixture(scope="module")
def recipe():
    return recipes.override(recipes.load("digits"), {"model.width": 8, "train.epochs": 2, "train.eval_epochs": 1})


def losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


def harming(monkeypatch, at, times):
    """Flips a bit of one device's parameters before that call of the step, in the first sessions of a run."""
    compiled_step, left = loop.compile_train_step, [times]

    def compiled(job, run):
        call, seen = compiled_step(job, run), [0]

        def harmed(state, *batch):
            seen[0] += 1
            if int(state.step) == at and left[0]:
                left[0] -= 1
                name = sorted(state.params)[0]
                first = jax.tree.leaves(state.params[name])[0]
                odd = flipped(first, job.mesh.devices.flat[1])
                params = jax.tree.map(lambda a: odd if a is first else a, state.params)
                state = state._replace(params=params)
            return call(state, *batch)

        return harmed

    monkeypatch.setattr(loop, "compile_train_step", compiled)


def test_a_run_goes_back_to_its_checkpoint_and_ends_as_if_nothing_had_been(recipe, tmp_path, monkeypatch, capsys):
    where, options = pod.of(jax.devices(), "2x2"), Options(check_steps=4)
    loop.train(recipe, pod=where, options=options, folder=tmp_path / "whole", console=Console(quiet=True))
    harming(monkeypatch, at=17, times=1)
    loop.train(recipe, pod=where, options=options, folder=tmp_path / "harmed", console=Console(width=300))
    said = capsys.readouterr().out
    assert "differs from the rest; going back to the last checkpoint" in said
    assert "resuming after step 12" in said
    assert losses(tmp_path / "harmed") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_device_that_goes_wrong_again_and_again_ends_the_run(recipe, tmp_path, monkeypatch):
    harming(monkeypatch, at=2, times=100)
    with pytest.raises(UserError, match="and not for the first time"):
        loop.train(
            recipe,
            pod=pod.of(jax.devices(), "2x2"),
            options=Options(check_steps=4),
            folder=tmp_path,
            console=Console(quiet=True),
        )
