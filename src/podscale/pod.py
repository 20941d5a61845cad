"""Pod: the devices to train on, as a 2-D torus of rows x columns of chips, found on this machine or named.

A batch-norm tile of h x w chips splits both dimensions of the torus, so one mesh with the six axes below names every
group that training sums over: a tile is `TILE`, a column ring `COLUMN`, a row ring `ROW`, the pod `ALL_AXES`. No other
module has lists of device numbers.

A TPU pod may consist of several slices, each a torus of its own, which a slower network connects. They are laid out one
below the other, and no tile, row or column crosses from one into the next. In a cluster of GPUs a row is a node.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.processes.group import get_rank_and_size
from podscale.processes.host import measure_usable_memory

SLICE, CORE = "slice", "core"
COLUMN = ("tile_y", "y")
ROW = ("tile_x", "x")
ALL_AXES = (SLICE, *COLUMN, *ROW, CORE)
TILE = ("y", "x", "core")
# Not in mesh order: in this order, a tile owns a contiguous block of the global batch's positions.
BATCH_AXES = (SLICE, "tile_y", "tile_x", "y", "x", CORE)
# kind: (devices per chip in JAX, chips per host, bytes of memory per device)
CHIPS = MappingProxyType(
    {
        "v2": (2, 4, 8 << 30),
        "v3": (2, 4, 16 << 30),
        "v4": (1, 4, 32 << 30),
        "v5e": (1, 4, 16 << 30),
        "v5p": (1, 4, 95 << 30),
        "v6e": (1, 4, 32 << 30),
        "v100": (1, 8, 32 * 10**9),
        "a100": (1, 8, 40 * 10**9),
        "a100-80gb": (1, 8, 80 * 10**9),
        "h100": (1, 8, 80 * 10**9),
        "h100-96gb": (1, 8, 96 * 10**9),
        "h200": (1, 8, 141 * 10**9),
        "cpu": (1, 1, 4 << 30),
    }
)
THREE_DIMENSIONS = ("v4", "v5p")  # kinds whose torus may have a third dimension
GPU_KINDS = ("v100", "a100", "a100-80gb", "h100", "h100-96gb", "h200")


@dataclass(frozen=True)
class Pod:
    """A torus of chips: rows x columns, each with `cores` devices.

    Args:
        kind: "cpu", a chip in `CHIPS`, or JAX's name of the device.
        rows: chips in a column, of all slices together.
        cols: chips in a row.
        cores: devices per chip.
        hosts: processes that the devices belong to.
        devices: JAX devices in (row, column, core) order; empty for a pod that is only named.
        memory_bytes: per device.
        depth: of the third dimension of a 3-D torus, which is folded into the columns.
        slices: tori of equal shape that lie one below the other.

    >>> Pod("v3", rows=32, cols=32, cores=2, hosts=256).size
    2048
    """

    kind: str
    rows: int
    cols: int
    cores: int = 1
    hosts: int = 1
    devices: tuple["jax.Device", ...] = field(default=(), repr=False, compare=False)
    memory_bytes: int = 4 << 30
    depth: int = 1
    slices: int = 1

    @property
    def slice_rows(self) -> int:
        """Chips in a column of one slice."""
        return self.rows // self.slices

    @property
    def dims(self) -> tuple[int, ...]:
        """Chips along each dimension of a slice: of a row, of a column, and of the third where there is one."""
        flat = (self.cols // self.depth, self.slice_rows)
        return flat if self.depth == 1 else (*flat, self.depth)

    @property
    def is_gpu_cluster(self) -> bool:
        """Whether rows are nodes, inside of which GPUs are closer to each other than to those of other nodes."""
        return self.kind in GPU_KINDS or (bool(self.devices) and self.devices[0].platform == "gpu")

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.rows * self.cols * self.cores

    @property
    def is_present(self) -> bool:
        """Whether the pod consists of this machine's devices."""
        return bool(self.devices)

    @property
    def shape(self) -> str:
        """Rows x columns, such as "2x4"; of each slice, with their number, where there are several: "2x4*2"."""
        return f"{self.slice_rows}x{self.cols}" + (f"*{self.slices}" if self.slices > 1 else "")

    def mesh(self, tile: tuple[int, int] = (1, 1)) -> Mesh:
        """Return the devices as a mesh with the six axes, for batch-norm tiles of `tile` = (h, w) chips."""
        h, w = tile
        grid = np.array(self.devices, dtype=object)
        shape = (self.slices, self.slice_rows // h, h, self.cols // w, w, self.cores)
        return Mesh(grid.reshape(shape), ALL_AXES)


def make_batch_sharding(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Return the sharding that splits one axis over all devices; each tile has a contiguous block of positions.

    Args:
        mesh: of a pod.
        axis: of the array.
    """
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, BATCH_AXES))


def parse_shape(text: str) -> tuple[int, int]:
    """Return rows and columns of "RxC".

    Raises:
        UserError: the text has another form.

    >>> parse_shape("2x4")
    (2, 4)
    """
    rows, by, cols = text.lower().partition("x")
    if not by or not rows.isdecimal() or not cols.isdecimal() or not int(rows) or not int(cols):
        raise UserError(f"a pod's shape is ROWSxCOLUMNS, such as 2x4, not {text!r}")
    return int(rows), int(cols)


def split_slices(shape: str) -> tuple[str, int]:
    """Return the shape of a slice and the number of slices of "SHAPE*N"; without a number, there is one.

    Raises:
        UserError: the number is not valid.

    >>> split_slices("16x16*4"), split_slices("2x4")
    (('16x16', 4), ('2x4', 1))
    """
    flat, star, count = shape.partition("*")
    if star and (not count.isdecimal() or not int(count)):
        raise UserError(f"a pod of several slices is ROWSxCOLUMNS*SLICES, such as 16x16*4, not {shape!r}")
    return flat, int(count or 1)


def parse_pod(text: str) -> Pod:
    """Return a pod that need not exist on this machine.

    Args:
        text: "KIND:RxC", such as v3:32x32, "KIND:RxCxD" for a 3-D torus, and "*N" after either for N slices of TPUs.

    Returns:
        A pod without devices, for plans and forecasts.

    Raises:
        UserError: the chip is not known, or the shape has another form.

    >>> parse_pod("v3:32x32").size
    2048
    >>> parse_pod("v4:4x4x8").dims
    (4, 4, 8)
    >>> parse_pod("v5e:16x16*4").size
    1024
    """
    kind, _, shape = text.partition(":")
    if kind not in CHIPS:
        raise UserError(f"there is no chip kind {kind!r}: {suggest_names(kind, CHIPS)}")
    shape, slices = split_slices(shape)
    if slices > 1 and kind in GPU_KINDS:
        raise UserError(f"GPUs have no slices: the rows of {kind}:{shape} are nodes; give {kind}:NODESxGPUS")
    deep = kind in THREE_DIMENSIONS and shape.count("x") == 2
    flat, _, last = shape.rpartition("x") if deep else (shape, "", "1")
    if not last.isdecimal() or not int(last):
        raise UserError(f"a 3-D pod's shape is ROWSxCOLUMNSxDEPTH, such as 4x4x8, not {shape!r}")
    rows, cols = parse_shape(flat)
    cores, chips_per_host, memory_bytes = CHIPS[kind]
    depth = int(last)
    hosts = slices * max(1, -(-rows * cols * depth // chips_per_host))
    rows, cols = slices * rows, cols * depth
    return Pod(kind, rows, cols, cores, hosts, memory_bytes=memory_bytes, depth=depth, slices=slices)


def find_pod(shape: str = "", virtual: str = "", cores: int = 0) -> Pod:
    """Return the devices of this machine, or of all processes that have joined, as a torus.

    Args:
        shape: "RxC", how to lay them out; of each slice, where there are several, or "RxC*N" to simulate N slices.
            Empty: as the hardware is wired, or as square as possible.
        virtual: "RxC", to simulate R·C devices on the CPU instead, or "RxC*N".
        cores: devices per chip; on CPUs, each process makes that many; 0: as the hardware says.

    Returns:
        A pod with devices.

    Raises:
        UserError: the devices do not fit the shape.

    >>> find_pod(virtual="1x1").kind
    'cpu'
    """
    if cores < 0:
        raise UserError(f"pod.cores must be 0 or more, not {cores}")
    if virtual:
        flat, slices = split_slices(virtual)
        rows, cols = parse_shape(flat)
        cores = cores or 1
        return _make_torus(_make_virtual_devices(slices * rows * cols * cores), slices * rows, cols, cores, slices)
    if cores:
        _request_cores(cores)
    devices = list(jax.devices())
    cores = cores or _count_cores(devices)
    chips, remainder = divmod(len(devices), cores)
    if remainder:
        raise UserError(f"pod.cores {cores} does not divide {len(devices)} devices")
    flat, asked = split_slices(shape)
    slices = _count_slices(devices)
    if slices > 1 and "*" in shape and asked != slices:
        raise UserError(f"pod.shape {shape} has {asked} slices, but there are {slices}")
    slices = slices if slices > 1 else asked
    rows, cols = parse_shape(flat) if shape else _choose_shape(devices, cores, slices)
    if slices * rows * cols != chips:
        shapes = " or ".join(_list_shapes(chips // slices))
        each = f" in each of {slices} slices" if slices > 1 else ""
        present = f"{chips // slices}{each}"
        raise UserError(f"pod.shape {shape} needs {rows * cols} chips{each}, but there are {present}; try {shapes}")
    return _make_torus(devices, slices * rows, cols, cores, slices)


def make_pod(devices: list[jax.Device], shape: str, cores: int = 0) -> Pod:
    """Return the first of some devices as an RxC torus; for tests and notebooks that use a part of a machine."""
    flat, slices = split_slices(shape)
    rows, cols = parse_shape(flat)
    cores = cores or _count_cores(devices)
    count = slices * rows * cols * cores
    if len(devices) < count:
        raise UserError(f"a {shape} torus needs {count} devices, but there are {len(devices)}")
    return _make_torus(devices[:count], slices * rows, cols, cores, slices)


# --- layout --------------------------------------------------------------------------------------------------------


def _make_virtual_devices(count: int) -> list[jax.Device]:
    """Return CPU devices; each process makes its share of them."""
    _, processes = get_rank_and_size()
    if count % processes:
        raise UserError(f"pod.virtual: {count} devices do not divide over {processes} processes")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count // processes)
    except RuntimeError:  # the backend already runs: use its devices
        pass
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(f"{count} virtual devices were asked for, but JAX already runs with {len(devices)} CPU devices")
    return devices[:count]


def _request_cores(count: int) -> None:
    """Set the number of this process's CPU devices, which works only before JAX runs; others are as they are."""
    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def _make_torus(devices: list[jax.Device], rows: int, cols: int, cores: int, slices: int = 1) -> Pod:
    ordered = sorted(devices, key=get_position)
    kind = "cpu" if devices[0].platform == "cpu" else devices[0].device_kind
    hosts = len({d.process_index for d in devices})
    return Pod(kind, rows, cols, cores, hosts, tuple(ordered), _measure_device_memory(devices), slices=slices)


def get_position(device: jax.Device) -> tuple[int, ...]:
    """Return a key that sorts devices by slice, row, column and core.

    On TPU by coordinates, of which every slice has its own; else by node, process and number.
    """
    if getattr(device, "coords", None) is not None and device.platform == "tpu":
        x, y, z = device.coords
        return _get_slice(device), y, z, x, device.core_on_chip
    return _get_slice(device), device.process_index, device.id


def _get_slice(device: jax.Device) -> int:
    """Return the number of a TPU's slice, or of the GPUs that NVLink connects; 0 where JAX does not say."""
    return getattr(device, "slice_index", None) or 0


def _count_slices(devices: list[jax.Device]) -> int:
    """Return the number of TPU slices.

    Raises:
        UserError: they differ in size.
    """
    if devices[0].platform != "tpu":
        return 1
    sizes = Counter(map(_get_slice, devices))
    if len(set(sizes.values())) > 1:
        listed = ", ".join(str(sizes[number]) for number in sorted(sizes))
        raise UserError(f"the slices have different numbers of devices: {listed}; use slices of one shape")
    return len(sizes)


def _count_cores(devices: list[jax.Device]) -> int:
    if devices[0].platform != "tpu":
        return 1
    return len({d.core_on_chip for d in devices})


def _measure_device_memory(devices: list[jax.Device]) -> int:
    """Return bytes of the device with the least memory: all processes must compute the same plan."""
    local = [d for d in devices if d.process_index == jax.process_index()]
    if devices[0].platform == "cpu":
        memory = measure_usable_memory() // max(len(local), 1)
    else:
        stats = local[0].memory_stats() if local else None
        memory = int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else 16 << 30
    if jax.process_count() == 1:
        return memory
    return int(multihost_utils.process_allgather(np.int32(memory >> 20)).min()) << 20


def _choose_shape(devices: list[jax.Device], cores: int, slices: int) -> tuple[int, int]:
    """Return physical rows and columns of a slice on TPU; nodes x chips per node on clusters; else nearly square."""
    chips = len(devices) // cores // slices
    if devices[0].platform == "tpu":
        coords = [d.coords for d in devices]
        rows = len({y for _, y, _ in coords})
        return rows, chips // rows
    nodes = Counter(getattr(d, "slice_index", None) for d in devices) if devices[0].platform == "gpu" else Counter()
    if nodes and None not in nodes and len(set(nodes.values())) == 1:
        return len(nodes), chips // len(nodes)
    return shape_cluster(chips, len({d.process_index for d in devices}))


def shape_cluster(chips: int, hosts: int) -> tuple[int, int]:
    """Return rows and columns of chips that no wiring lays out: hosts x chips per host, or else nearly square.

    >>> shape_cluster(8, 2), shape_cluster(4, 4)
    ((2, 4), (2, 2))
    """
    if hosts > 1 and chips // hosts > 1 and chips % hosts == 0:
        return hosts, chips // hosts
    return parse_shape(_list_shapes(chips)[0])


def _list_shapes(count: int) -> list[str]:
    """Return the shapes that `count` chips can have, most square first.

    >>> _list_shapes(6)
    ['2x3', '1x6']
    """
    return [f"{r}x{count // r}" for r in range(int(count**0.5), 0, -1) if count % r == 0]
