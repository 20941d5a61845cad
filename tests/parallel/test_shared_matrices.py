"""Matrices that devices share are computed once each, give the same results everywhere, and are divided evenly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from podscale import pod
from podscale.parallel import sharded
from podscale.parallel.shared_matrices import (
    GROUP_AXES,
    Kind,
    assign_matrices,
    count_group_devices,
    count_temporary_elements,
    map_parts,
    map_replicated,
)
from podscale.parallel.summation import Transfer

KINDS = {"a": Kind(5, (3, 3, 2, 5), 90.0), "b": Kind(2, (4, 7), 30.0), "c": Kind(3, (6, 6), 50.0)}
PODS = [("2x2", 1, "row"), ("1x2*2", 2, "slice"), ("2x3", 2, "pod")]
SLOW_PODS = [("1x1", 1, "pod"), ("4x4", 1, "pod"), ("4x4", 1, "row"), ("2x2*2", 1, "slice"), ("2x2", 4, "row")]


def make_stacks():
    random = np.random.default_rng(0)
    return {name: random.normal(size=(kind.count, *kind.shape)).astype(np.float32) for name, kind in KINDS.items()}


def compute(name, matrix):
    """Return something that needs the whole matrix, and differs between stacks."""
    flat = matrix.reshape(-1, matrix.shape[-1])
    return (len(name) + ord(name)) * (flat @ (flat.T @ flat)).reshape(matrix.shape)


def run(body, shape, cores):
    mesh = pod.make_pod(jax.devices(), shape, cores).mesh()
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(make_stacks())


def assert_equal(results):
    for name, stack in make_stacks().items():
        expected = jax.vmap(lambda matrix, name=name: compute(name, matrix))(stack)
        np.testing.assert_allclose(results[name], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "cores", "group"), [*PODS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_PODS)]
)
def test_matrices_that_all_devices_hold_are_computed_by_a_group(shape, cores, group):
    assert_equal(run(lambda stacks: map_replicated(compute, stacks, KINDS, axes=GROUP_AXES[group]), shape, cores))


@pytest.mark.parametrize(
    ("shape", "cores"),
    [("2x3", 2), *(pytest.param(*case[:2], marks=pytest.mark.slow) for case in [*PODS[:2], *SLOW_PODS])],
)
def test_parts_of_matrices_go_to_their_owners_and_back(shape, cores):
    def body(stacks):
        parts = {name: jnp.stack([sharded.select_parts(matrix) for matrix in stack]) for name, stack in stacks.items()}
        results = map_parts(compute, parts, KINDS, axes=sharded.OWNERS)
        rows, like = ({name: list(stack) for name, stack in tree.items()} for tree in (results, stacks))
        return sharded.gather_parameters(rows, like, Transfer())

    assert_equal({name: np.stack(rows) for name, rows in run(body, shape, cores).items()})


def test_a_model_without_matrices_sends_nothing():
    assert map_replicated(compute, {}, {}, axes=GROUP_AXES["pod"]) == {}
    assert map_parts(compute, {}, {}, axes=sharded.OWNERS) == {}


@pytest.mark.parametrize("devices", [1, 2, 3, 7, 16, 1000])
def test_work_is_divided_about_evenly_and_every_matrix_has_its_own_place(devices):
    assignment = assign_matrices(KINDS, devices)
    total = sum(kind.count * kind.cost for kind in KINDS.values())
    assert total / devices <= assignment.cost < total / devices + max(kind.cost for kind in KINDS.values())
    places = {
        (owner, offset + i)
        for name, kind in KINDS.items()
        for owner, offset in zip(assignment.owners[name], assignment.offsets[name], strict=True)
        for i in range(kind.size)
    }
    assert len(places) == sum(kind.count * kind.size for kind in KINDS.values())
    assert max(place for _, place in places) == assignment.length - 1
    assert max(owner for owner, _ in places) < devices


def test_temporaries_of_parts_shrink_with_the_devices_and_those_of_whole_matrices_do_not():
    whole = sum(kind.count * kind.size for kind in KINDS.values())
    assert count_temporary_elements(KINDS, 1, is_partitioned=False) == 2 * whole
    parts = [count_temporary_elements(KINDS, devices, is_partitioned=True) for devices in (1, 2, 4)]
    assert parts == sorted(parts, reverse=True)
    assert count_temporary_elements(KINDS, 4, is_partitioned=False) > 3 * whole


def test_groups_are_those_of_the_mesh():
    torus = pod.make_pod(jax.devices(), "2x2*2", 2)
    sizes = {name: count_group_devices(torus, name) for name in GROUP_AXES}
    assert sizes == {"device": 1, "row": 4, "slice": 8, "pod": 16}
    mesh = torus.mesh()
    assert sizes == {name: int(np.prod([mesh.shape[axis] for axis in axes])) for name, axes in GROUP_AXES.items()}
