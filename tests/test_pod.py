"""Pods: devices that are found, named or simulated become rows x columns, and a mesh whose axes name the tiles."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from podscale.errors import UserError
from podscale.pod import (
    ALL_AXES,
    COLUMN,
    ROW,
    TILE,
    Pod,
    find_pod,
    make_batch_sharding,
    make_pod,
    parse_pod,
    parse_shape,
)
from podscale.processes import group


def get_refusal(function, *arguments, **options):
    with pytest.raises(UserError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- the mesh ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (1, 4), (4, 4)])
def test_a_tile_splits_both_dimensions_of_the_torus(tile):
    mesh = make_pod(jax.devices(), "4x4").mesh(tile)
    h, w = tile
    assert mesh.axis_names == ALL_AXES == ("slice", "tile_y", "y", "tile_x", "x", "core")
    assert mesh.devices.shape == (1, 4 // h, h, 4 // w, w, 1)
    assert np.array_equal(mesh.devices.reshape(4, 4), np.array(jax.devices()).reshape(4, 4))
    size = {axes: np.prod([mesh.shape[axis] for axis in axes]) for axes in (COLUMN, ROW, TILE)}
    assert size == {COLUMN: 4, ROW: 4, TILE: h * w}


TILINGS = [(shape, tile) for shape in ("2x4", "4x2", "4x4") for tile in ((1, 1), (1, 2), (2, 1), (2, 2))]


@pytest.mark.parametrize(
    ("shape", "tile"), [*TILINGS, ("1x8", (1, 2)), ("1x8", (1, 4)), ("4x4", (4, 2)), ("8x2", (4, 1))]
)
@pytest.mark.parametrize("axis", [0, 2])
def test_each_tile_has_a_contiguous_block_of_positions(shape, tile, axis):
    pod = make_pod(jax.devices(), shape)
    h, w = tile
    batch = 2 * pod.size
    indices = make_batch_sharding(pod.mesh(tile), axis).devices_indices_map((3,) * axis + (batch,))
    positions = np.arange(batch)
    blocks = {}
    for (row, col), device in zip(np.ndindex(pod.rows, pod.cols), pod.devices, strict=True):
        part = positions[indices[device][axis]]
        assert len(part) == 2
        blocks.setdefault((row // h, col // w), []).extend(part)
    for number, tile_at in enumerate(sorted(blocks)):  # tiles are numbered along rows, then down
        assert sorted(blocks[tile_at]) == list(range(number * 2 * h * w, (number + 1) * 2 * h * w))


# --- named ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cores", "hosts", "memory", "size"),
    [
        ("v3:32x32", 2, 256, 16 << 30, 2048),
        ("v2:16x16", 2, 64, 8 << 30, 512),
        ("v5e:4x4", 1, 4, 16 << 30, 16),
        ("h100:3x8", 1, 3, 80 * 10**9, 24),
        ("h200:1x1", 1, 1, 141 * 10**9, 1),
        ("cpu:2X3", 1, 6, 4 << 30, 6),
    ],
)
def test_a_named_pod_need_not_exist(text, cores, hosts, memory, size):
    pod = parse_pod(text)
    kind, _, shape = text.lower().partition(":")
    assert (pod.kind, pod.shape, pod.cores, pod.hosts, pod.memory_bytes) == (kind, shape, cores, hosts, memory)
    assert (pod.size, pod.is_present) == (size, False)


def test_kinds_and_shapes_are_refused_with_a_suggestion():
    assert "did you mean" in get_refusal(parse_pod, "v5:2x2")
    assert "h200" in get_refusal(parse_pod, "zzz:2x2")
    for text in ("v3", "v3:", "v3:4", "v3:0x4", "v3:4x0", "v3:ax4", "v3:-1x4", "v3:4x4x4", "v3:2.0x2", "v3:²x2"):
        assert "ROWSxCOLUMNS, such as 2x4" in get_refusal(parse_pod, text)
    assert parse_shape("12x3") == (12, 3)


# --- found ---------------------------------------------------------------------------------------------------------


def test_devices_are_laid_out_as_square_as_possible():
    pod = find_pod()
    assert (pod.kind, pod.shape, pod.size, pod.hosts, pod.is_present) == ("cpu", "4x4", 16, 1, True)
    assert pod.devices == tuple(jax.devices())
    assert 0 < pod.memory_bytes * 16 < 2**46


def test_a_shape_that_does_not_fit_is_refused_with_those_that_do():
    assert find_pod(shape="2x8").shape == "2x8"
    assert (
        get_refusal(find_pod, shape="3x5") == "pod.shape 3x5 needs 15 chips, but there are 16; try 4x4 or 2x8 or 1x16"
    )


def test_virtual_devices_have_the_requested_shape():
    pod = find_pod(virtual="2x3")
    assert (pod.kind, pod.shape, pod.devices) == ("cpu", "2x3", tuple(jax.devices()[:6]))
    assert "17 virtual devices" in get_refusal(find_pod, virtual="1x17")
    assert "ROWSxCOLUMNS" in get_refusal(find_pod, virtual="4")


def test_a_pod_can_use_a_part_of_the_devices():
    pod = make_pod(jax.devices(), "2x2")
    assert (pod.shape, pod.devices) == ("2x2", tuple(jax.devices()[:4]))
    assert make_pod(jax.devices()[::-1], "1x2").devices == tuple(jax.devices()[-2:])  # always sorted
    assert "17" in get_refusal(make_pod, jax.devices(), "1x17")


def test_pods_compare_without_their_devices():
    assert make_pod(jax.devices(), "2x2") == make_pod(jax.devices()[4:], "2x2")
    assert "Device" not in repr(make_pod(jax.devices(), "2x2"))


# --- TPU slices and clusters ---------------------------------------------------------------------------------------


def make_tpus(columns, rows, layers=1, cores=1, limit=None, slice_index=0):
    """Return devices as libtpu shows them, in its numbering: x runs fastest, then y, then z."""
    positions = itertools.product(range(layers), range(rows), range(columns), range(cores))
    stats = {"bytes_limit": limit} if limit else None
    return [
        SimpleNamespace(
            platform="tpu",
            device_kind="TPU v3",
            coords=(x, y, z),
            core_on_chip=core,
            slice_index=slice_index,
            process_index=0,
            id=number,
            memory_stats=lambda: stats,
        )
        for number, (z, y, x, core) in enumerate(positions)
    ]


def shuffle(devices):
    return [devices[i] for i in np.random.default_rng(0).permutation(len(devices))]


def test_a_slice_is_laid_out_by_its_coordinates(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: shuffle(make_tpus(4, 2, limit=123)))
    pod = find_pod()
    assert (pod.kind, pod.rows, pod.cols, pod.cores, pod.size, pod.memory_bytes) == ("TPU v3", 2, 4, 1, 8, 123)
    assert [d.coords[:2] for d in pod.devices] == [(x, y) for y in range(2) for x in range(4)]


def test_cores_of_a_chip_are_the_innermost_axis(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: shuffle(make_tpus(4, 2, cores=2)))
    pod = find_pod()
    assert (pod.rows, pod.cols, pod.cores, pod.size) == (2, 4, 2, 16)
    assert pod.memory_bytes == 16 << 30  # if the device does not report it
    grid = np.array(pod.devices, dtype=object).reshape(2, 4, 2)
    for row, col, core in np.ndindex(2, 4, 2):
        assert (grid[row, col, core].coords, grid[row, col, core].core_on_chip) == ((col, row, 0), core)
    assert find_pod(shape="4x2").shape == "4x2"
    assert get_refusal(find_pod, shape="4x4") == "pod.shape 4x4 needs 16 chips, but there are 8; try 2x4 or 1x8"


def test_the_third_dimension_is_folded_into_columns(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: shuffle(make_tpus(2, 3, layers=2, cores=2)))
    pod = find_pod()
    assert (pod.rows, pod.cols, pod.cores) == (3, 4, 2)
    grid = np.array(pod.devices, dtype=object).reshape(3, 4, 2)
    for row, col, core in np.ndindex(3, 4, 2):
        assert grid[row, col, core].coords == (col % 2, row, col // 2)


def test_part_of_a_slice_keeps_both_cores_of_its_chips():
    pod = make_pod(make_tpus(2, 2, cores=2), "1x2")
    assert (pod.size, len(pod.devices)) == (4, 4)


def test_a_cluster_is_nodes_by_devices_per_node(monkeypatch):
    def make_gpu(process, number):
        device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", process_index=process, id=number)
        device.memory_stats = lambda: {"bytes_limit": 99}
        return device

    devices = [make_gpu(process, 8 * process + local) for process in range(3) for local in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: shuffle(devices))
    pod = find_pod()
    assert (pod.kind, pod.shape, pod.hosts, pod.memory_bytes) == ("NVIDIA H200", "3x8", 3, 99)
    assert [d.id for d in pod.devices] == list(range(24))
    monkeypatch.setattr(
        jax, "devices", lambda: devices[::8] + devices[1:2]
    )  # 4 devices over 3 nodes: no nodes x devices
    assert find_pod().shape == "2x2"


def test_slices_with_equal_coordinates_are_laid_out_one_below_the_other(monkeypatch):
    two = [device for number in (1, 0) for device in make_tpus(4, 2, cores=2, slice_index=number)]
    monkeypatch.setattr(jax, "devices", lambda: shuffle(two))
    pod = find_pod()
    assert (pod.shape, pod.rows, pod.cols, pod.cores, pod.slices, pod.size) == ("2x4*2", 4, 4, 2, 2, 32)
    assert pod.dims == (4, 2)
    grid = np.array(pod.devices, dtype=object).reshape(2, 2, 4, 2)
    for number, row, col, core in np.ndindex(grid.shape):
        device = grid[number, row, col, core]
        assert (device.slice_index, device.coords, device.core_on_chip) == (number, (col, row, 0), core)
    mesh = np.array(pod.devices, dtype=object).reshape(2, 1, 2, 2, 2, 2)  # tiles of 2x2: six axes
    for part in mesh:
        assert len({device.slice_index for device in part.flat}) == 1
    assert find_pod(shape="4x2").shape == "4x2*2"
    assert find_pod(shape="4x2*2").shape == "4x2*2"
    assert "has 4 slices, but there are 2" in get_refusal(find_pod, shape="2x2*4")
    assert "needs 16 chips in each of 2 slices, but there are 8" in get_refusal(find_pod, shape="4x4")


def test_slices_of_different_sizes_are_refused(monkeypatch):
    devices = make_tpus(4, 2) + make_tpus(2, 2, slice_index=1)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert "different numbers of devices: 8, 4" in get_refusal(find_pod)


def test_slices_can_be_named_and_simulated():
    pod = parse_pod("v5e:16x16*4")
    assert (pod.shape, pod.rows, pod.slice_rows, pod.cols, pod.hosts, pod.size) == ("16x16*4", 64, 16, 16, 256, 1024)
    deep = parse_pod("v5p:4x4x8*2")
    assert (deep.dims, deep.slices, deep.size) == ((4, 4, 8), 2, 256)
    assert find_pod(virtual="2x2*2").mesh((1, 2)).shape == dict(zip(ALL_AXES, (2, 2, 1, 1, 2, 1), strict=True))
    for text in ("v5e:4x4*", "v5e:4x4*0", "v5e:4x4*x"):
        assert "such as 16x16*4" in get_refusal(parse_pod, text)
    assert "h200:NODESxGPUS" in get_refusal(parse_pod, "h200:4x8*2")


def make_gpus(nodes, per_node):
    """Return the devices of a process per GPU; JAX numbers what NVLink connects."""
    return [
        SimpleNamespace(
            platform="gpu",
            device_kind="NVIDIA H200",
            process_index=node * per_node + local,
            id=node * per_node + local,
            slice_index=node,
            memory_stats=lambda: {"bytes_limit": 99},
        )
        for node in range(nodes)
        for local in range(per_node)
    ]


def test_rows_are_nodes_also_with_a_process_per_gpu(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: shuffle(make_gpus(2, 8)))
    pod = find_pod()
    assert (pod.shape, pod.slices, pod.hosts, pod.is_gpu_cluster) == ("2x8", 1, 16, True)
    assert [d.id for d in pod.devices] == list(range(16))
    monkeypatch.setattr(jax, "devices", lambda: shuffle(make_gpus(1, 8)))
    assert find_pod().shape == "1x8"


def test_invalid_process_numbers_are_refused():
    for processes, process in ((0, 0), (2, 2), (2, -1)):
        assert "--process" in get_refusal(group.join, "localhost:1", processes, process)


def test_the_size_of_a_pod_counts_devices():
    assert Pod("v3", 4, 8, cores=2).size == 64
    assert Pod("cpu", 4, 8).shape == "4x8"
