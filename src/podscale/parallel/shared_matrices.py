"""Work on many matrices, shared by the devices: each matrix is computed by one device, and all get the results.

Where a function of whole matrices is expensive, such as the orthogonalization of Muon's, computing it on every device
wastes all but one of the results. Here every device takes its share of the matrices, chosen so that all devices have
about the same work, and computes them one after the other. Devices run the same program: how many matrices of each
shape it goes through, and which, are tables that a device looks up by its own number. So a matrix goes through the same
operations wherever it is computed, and the results do not depend on the number of devices.

`map_replicated` is for matrices that every device holds: results are gathered over a group of devices. `map_parts` is
for matrices of which every device holds a part (`sharded.py`): parts are sent to the matrix's owner and back.
"""

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Num
from numpy.typing import NDArray

from podscale.pod import ALL_AXES, CORE, ROW, SLICE, Pod

# Groups of devices that may share work, and the axes of the mesh along which they lie.
GROUP_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "device": (),
        "row": (*ROW, CORE),
        "slice": tuple(axis for axis in ALL_AXES if axis != SLICE),
        "pod": ALL_AXES,
    }
)
Stacks = Mapping[str, Float[Array, "_matrices *_shape"]]  # by name, matrices of one shape each
MatrixFunction = Callable[
    [str, Float[Array, "*shape"]], Float[Array, "*shape"]
]  # the stack's name, a matrix -> another


@dataclass(frozen=True)
class Kind:
    """The matrices of one stack: their number, their shape, and what computing one of them costs, in any unit."""

    count: int
    shape: tuple[int, ...]
    cost: float

    @property
    def size(self) -> int:
        """Elements of a matrix."""
        return math.prod(self.shape)


Kinds = Mapping[str, Kind]  # by the stacks' names
SharedMap = Callable[[MatrixFunction, Stacks, Kinds], dict[str, Array]]  # a function of every matrix


def count_group_devices(pod: Pod, name: str) -> int:
    """Return the devices of a group of this name in `GROUP_AXES`.

    >>> [count_group_devices(Pod("v3", 4, 2, cores=2, slices=2), name) for name in GROUP_AXES]
    [1, 4, 8, 16]
    """
    row = pod.cols * pod.cores
    return {"device": 1, "row": row, "slice": row * pod.slice_rows, "pod": pod.size}[name]


# --- who computes what -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assignment:
    """Which device of a group computes which matrix, and where in its buffer the result lies.

    Attributes:
        owners: by stack, the device of each matrix.
        offsets: by stack, the first element of each matrix in its owner's buffer.
        length: elements of a buffer, the same on all devices.
        cost: of the device that has most to do.
    """

    owners: dict[str, NDArray[np.int32]]
    offsets: dict[str, NDArray[np.int32]]
    length: int
    cost: float


def assign_matrices(kinds: Kinds, devices: int, parts: int = 1) -> Assignment:
    """Share matrices among devices: the most expensive first, each to the device that has least to do so far.

    Args:
        kinds: the matrices.
        devices: among which to share them.
        parts: into which each matrix is divided; a buffer holds one part of each matrix of its device.

    >>> kinds = {"large": Kind(2, (4, 4), 8.0), "small": Kind(3, (2, 2), 3.0)}
    >>> assignment = assign_matrices(kinds, devices=3)
    >>> {name: owners.tolist() for name, owners in assignment.owners.items()}, assignment.cost
    ({'large': [0, 1], 'small': [2, 2, 2]}, 9.0)
    """
    owners, offsets = ({name: np.zeros(kind.count, np.int32) for name, kind in kinds.items()} for _ in range(2))
    loads = [(0.0, device) for device in range(devices)]
    used = [0] * devices
    for name, kind in sorted(kinds.items(), key=lambda item: -item[1].cost):
        for i in range(kind.count):
            load, device = heapq.heappop(loads)
            owners[name][i], offsets[name][i] = device, used[device]
            used[device] += -(-kind.size // parts)
            heapq.heappush(loads, (load + kind.cost, device))
    return Assignment(owners, offsets, max(used), max(load for load, _ in loads))


class _Table(NamedTuple):
    """For each device, how many matrices of a stack it computes, which ones, and where in its buffer they lie."""

    counts: NDArray[np.int32]  # [devices]
    matrices: NDArray[np.int32]  # [devices, most matrices of a device]
    offsets: NDArray[np.int32]  # the same


def _make_table(assignment: Assignment, name: str, devices: int) -> _Table:
    owners = assignment.owners[name]
    counts = np.bincount(owners, minlength=devices).astype(np.int32)
    matrices, offsets = (np.zeros((devices, max(counts)), np.int32) for _ in range(2))
    for device in range(devices):
        own = np.flatnonzero(owners == device)
        matrices[device, : len(own)], offsets[device, : len(own)] = own, assignment.offsets[name][own]
    return _Table(counts, matrices, offsets)


# --- matrices that every device holds --------------------------------------------------------------------------------


def map_replicated(
    function: MatrixFunction, stacks: Stacks, kinds: Kinds, *, axes: tuple[str, ...]
) -> dict[str, Array]:
    """Return `function` of every matrix, on every device; the devices along `axes` share the work.

    Args:
        function: of a stack's name and one of its matrices; it must not communicate.
        stacks: [matrices, ...] each, the same on all devices.
        kinds: of the same names.
        axes: of the mesh; groups of devices along other axes each do the same work.
    """
    if not stacks:
        return {}
    devices, device = lax.axis_size(axes), lax.axis_index(axes)
    assignment = assign_matrices(kinds, devices)
    buffer = jnp.zeros(assignment.length, _get_dtype(stacks))
    for name, stack in stacks.items():
        table = _make_table(assignment, name, devices)

        def compute(i: Array, buffer: Array, name: str = name, stack: Array = stack, table: _Table = table) -> Array:
            matrix = lax.dynamic_index_in_dim(stack, _look_up(table.matrices, device, i), keepdims=False)
            return lax.dynamic_update_slice(
                buffer, function(name, matrix).ravel(), [_look_up(table.offsets, device, i)]
            )

        buffer = lax.fori_loop(0, _look_up(table.counts, device), compute, buffer)
    gathered = lax.all_gather(buffer, axes)
    return {
        name: jnp.stack(
            [
                gathered[owner, offset : offset + kind.size].reshape(kind.shape)
                for owner, offset in zip(assignment.owners[name], assignment.offsets[name], strict=True)
            ]
        )
        for name, kind in kinds.items()
    }


# --- matrices of which every device holds a part ---------------------------------------------------------------------


def map_parts(function: MatrixFunction, stacks: Stacks, kinds: Kinds, *, axes: tuple[str, ...]) -> dict[str, Array]:
    """Return this device's parts of `function` of every matrix; all devices share the work.

    Args:
        function: of a stack's name and one of its matrices; it must not communicate.
        stacks: [matrices, part] each: of every matrix, flattened and padded with zeros, this device's part.
        kinds: of the same names, for whole matrices.
        axes: of the mesh, in the order in which devices hold parts.
    """
    if not stacks:
        return {}
    devices, device = lax.axis_size(axes), lax.axis_index(axes)
    assignment = assign_matrices(kinds, devices, parts=devices)
    exchange = partial(lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
    own = exchange(_pack_parts(stacks, assignment, devices))  # [part, element of this device's matrices]
    for name, stack in stacks.items():
        table, shape, width = _make_table(assignment, name, devices), kinds[name].shape, stack.shape[1]

        def compute(
            i: Array,
            own: Array,
            name: str = name,
            shape: tuple[int, ...] = shape,
            width: int = width,
            table: _Table = table,
        ) -> Array:
            start = (np.int32(0), _look_up(table.offsets, device, i))
            parts = lax.dynamic_slice(own, start, (devices, width))
            result = function(name, parts.ravel()[: math.prod(shape)].reshape(shape)).ravel()
            padded = jnp.pad(result, (0, parts.size - result.size)).reshape(parts.shape)
            return lax.dynamic_update_slice(own, padded, start)

        own = lax.fori_loop(0, _look_up(table.counts, device), compute, own)
    return _unpack_parts(exchange(own), stacks, assignment)


def _pack_parts(stacks: Stacks, assignment: Assignment, devices: int) -> Num[Array, "owners length"]:
    """Return what this device sends to each owner: its parts of the owner's matrices."""
    pieces, position = [], 0
    places = [
        (int(owner) * assignment.length + int(offset), stack[i])
        for name, stack in stacks.items()
        for i, (owner, offset) in enumerate(zip(assignment.owners[name], assignment.offsets[name], strict=True))
    ]
    dtype = _get_dtype(stacks)
    for start, part in sorted(places, key=lambda place: place[0]):
        pieces += [jnp.zeros(start - position, dtype), part]
        position = start + part.size
    pieces.append(jnp.zeros(devices * assignment.length - position, dtype))
    return jnp.concatenate(pieces).reshape(devices, assignment.length)


def _unpack_parts(
    received: Num[Array, "owners length"], stacks: Stacks, assignment: Assignment
) -> dict[str, Num[Array, "_matrices _part"]]:
    """Return this device's parts of all matrices, from what each owner sent."""
    return {
        name: jnp.stack(
            [
                received[owner, offset : offset + stack.shape[1]]
                for owner, offset in zip(assignment.owners[name], assignment.offsets[name], strict=True)
            ]
        )
        for name, stack in stacks.items()
    }


def _look_up(table: NDArray[np.int32], *place: Int[Array, ""]) -> Int[Array, ""]:
    return jnp.asarray(table)[place]


def _get_dtype(stacks: Stacks) -> jnp.dtype:
    return jnp.result_type(*stacks.values())


# --- memory ----------------------------------------------------------------------------------------------------------


def count_temporary_elements(kinds: Kinds, devices: int, *, is_partitioned: bool) -> int:
    """Return the elements of the arrays that a device holds while it works on its share, about.

    Args:
        kinds: the matrices.
        devices: that share them.
        is_partitioned: whether devices hold parts of matrices, not all of them.
    """
    whole = sum(kind.count * kind.size for kind in kinds.values())
    if is_partitioned:
        length = devices * assign_matrices(kinds, devices, parts=devices).length
        return 2 * (whole // devices) + 3 * length  # what is sent, worked on, and received
    gathered = assign_matrices(kinds, devices).length * (devices + 1) if devices > 1 else 0
    return 2 * whole + gathered  # all matrices before and after
