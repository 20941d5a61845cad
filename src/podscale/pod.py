"""Pod: the devices to train on, as a 2-D torus of rows x columns of chips, found on this machine or named.

A batch-norm tile of h x w chips splits both dimensions of the torus, so one mesh with the five axes below names every
group that training sums over: a tile is `TILE`, a column ring `COLUMN`, a row ring `ROW`, the pod `ALL_AXES`. No other
module has lists of device numbers.
"""

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

ALL_AXES = ("tile_y", "y", "tile_x", "x", "core")
COLUMN = ("tile_y", "y")
ROW = ("tile_x", "x")
CORE = "core"
TILE = ("y", "x", "core")
# Not in mesh order: in this order, a tile owns a contiguous block of the global batch's positions.
BATCH_AXES = ("tile_y", "tile_x", "y", "x", "core")
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
        "h100": (1, 8, 80 * 10**9),
        "h200": (1, 8, 141 * 10**9),
        "cpu": (1, 1, 4 << 30),
    }
)
THREE_DIMENSIONS = ("v4", "v5p")  # kinds whose torus may have a third dimension


@dataclass(frozen=True)
class Pod:
    """A torus of chips: rows x columns, each with `cores` devices.

    Args:
        kind: "cpu", a chip in `CHIPS`, or JAX's name of the device.
        rows: chips in a column.
        cols: chips in a row.
        cores: devices per chip.
        hosts: processes that the devices belong to.
        devices: JAX devices in (row, column, core) order; empty for a pod that is only named.
        memory_bytes: per device.
        depth: of the third dimension of a 3-D torus, which is folded into the columns.

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

    @property
    def dims(self) -> tuple[int, ...]:
        """Chips along each dimension of the torus: of a row, of a column, and of the third where there is one."""
        flat = (self.cols // self.depth, self.rows)
        return flat if self.depth == 1 else (*flat, self.depth)

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
        """Rows x columns, such as "2x4"."""
        return f"{self.rows}x{self.cols}"

    def mesh(self, tile: tuple[int, int] = (1, 1)) -> Mesh:
        """Return the devices as a mesh with the five axes, for batch-norm tiles of `tile` = (h, w) chips."""
        h, w = tile
        grid = np.array(self.devices, dtype=object)
        return Mesh(grid.reshape(self.rows // h, h, self.cols // w, w, self.cores), ALL_AXES)


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


def named_pod(text: str) -> Pod:
    """Return a pod that need not exist on this machine.

    Args:
        text: "KIND:RxC", such as v3:32x32, or "KIND:RxCxD" for a 3-D torus.

    Returns:
        A pod without devices, for plans and forecasts.

    Raises:
        UserError: the chip is not known, or the shape has another form.

    >>> named_pod("v3:32x32").size
    2048
    >>> named_pod("v4:4x4x8").dims
    (4, 4, 8)
    """
    kind, _, shape = text.partition(":")
    if kind not in CHIPS:
        raise UserError(f"there is no chip kind {kind!r}: {suggest_names(kind, CHIPS)}")
    deep = kind in THREE_DIMENSIONS and shape.count("x") == 2
    flat, _, last = shape.rpartition("x") if deep else (shape, "", "1")
    if not last.isdecimal() or not int(last):
        raise UserError(f"a 3-D pod's shape is ROWSxCOLUMNSxDEPTH, such as 4x4x8, not {shape!r}")
    rows, cols = parse_shape(flat)
    cores, chips_per_host, memory_bytes = CHIPS[kind]
    depth = int(last)
    hosts = max(1, -(-rows * cols * depth // chips_per_host))
    return Pod(kind, rows, cols * depth, cores, hosts, memory_bytes=memory_bytes, depth=depth)


def find_pod(shape: str = "", virtual: str = "", cores: int = 0) -> Pod:
    """Return the devices of this machine, or of all processes that have joined, as a torus.

    Args:
        shape: "RxC", how to lay them out; empty: as the hardware is wired, or as square as possible.
        virtual: "RxC", to simulate R·C devices on the CPU instead.
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
        rows, cols = parse_shape(virtual)
        cores = cores or 1
        return _lay_out(_make_virtual_devices(rows * cols * cores), rows, cols, cores)
    if cores:
        _request_cores(cores)
    devices = list(jax.devices())
    cores = cores or _count_cores(devices)
    chips, remainder = divmod(len(devices), cores)
    if remainder:
        raise UserError(f"pod.cores {cores} does not divide {len(devices)} devices")
    rows, cols = parse_shape(shape) if shape else _choose_shape(devices, cores)
    if rows * cols != chips:
        shapes = " or ".join(_list_shapes(chips))
        raise UserError(f"pod.shape {shape} needs {rows * cols} chips, but there are {chips}; try {shapes}")
    return _lay_out(devices, rows, cols, cores)


def make_pod(devices: list[jax.Device], shape: str, cores: int = 0) -> Pod:
    """Return the first of some devices as an RxC torus; for tests and notebooks that use a part of a machine."""
    rows, cols = parse_shape(shape)
    cores = cores or _count_cores(devices)
    count = rows * cols * cores
    if len(devices) < count:
        raise UserError(f"a {shape} torus needs {count} devices, but there are {len(devices)}")
    return _lay_out(devices[:count], rows, cols, cores)


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


def _lay_out(devices: list[jax.Device], rows: int, cols: int, cores: int) -> Pod:
    ordered = sorted(devices, key=get_position)
    kind = "cpu" if devices[0].platform == "cpu" else devices[0].device_kind
    hosts = len({d.process_index for d in devices})
    return Pod(kind, rows, cols, cores, hosts, tuple(ordered), _measure_device_memory(devices))


def get_position(device: jax.Device) -> tuple[int, ...]:
    """Return a key that sorts devices by row, column and core: by coordinates on TPU, else by process and number."""
    if getattr(device, "coords", None) is not None and device.platform == "tpu":
        x, y, z = device.coords
        return y, z, x, device.core_on_chip
    return device.process_index, device.id


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


def _choose_shape(devices: list[jax.Device], cores: int) -> tuple[int, int]:
    """Return physical rows and columns on TPU; nodes x chips per node on clusters; else as square as possible."""
    chips = len(devices) // cores
    if devices[0].platform == "tpu":
        coords = [d.coords for d in devices]
        rows = len({y for _, y, _ in coords})
        return rows, chips // rows
    hosts = len({d.process_index for d in devices})
    if hosts > 1 and chips // hosts > 1 and chips % hosts == 0:
        return hosts, chips // hosts
    return parse_shape(_list_shapes(chips)[0])


def _list_shapes(count: int) -> list[str]:
    """Return the shapes that `count` chips can have, most square first.

    >>> _list_shapes(6)
    ['2x3', '1x6']
    """
    return [f"{r}x{count // r}" for r in range(int(count**0.5), 0, -1) if count % r == 0]
