"""Performance figures of each kind of chip, read from `chips.toml`, where every row names its source."""

import functools
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from types import MappingProxyType

from podscale.config.json_types import JsonObject
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError


@dataclass(frozen=True)
class Chip:
    """One row of chips.toml, which explains each field."""

    kind: str
    flops: float
    memory_rate: float
    memory_bytes: int
    cores: int
    chips_per_host: int
    host_cores: int
    axes: int
    link_rate: float
    hop_s: float
    start_s: float
    hides: float
    source: str
    node_rate: float = 0.0
    node_hop_s: float = 0.0
    slice_rate: float = 0.0
    slice_hop_s: float = 0.0
    points: tuple[tuple[int, float], ...] = ()  # (images per device, seconds per step), before `rate` sets their level
    curve: str = ""
    rate: float = 0.0
    rate_images: int = 0
    target: JsonObject = field(default_factory=dict, hash=False)

    @property
    def is_torus(self) -> bool:
        """Whether the links form a torus; otherwise nodes of `chips_per_host` chips are joined by a switch."""
        return self.axes > 0


def list_kinds() -> list[str]:
    """Return the kinds of chip that chips.toml describes.

    >>> list_kinds()[:3]
    ['v2', 'v3', 'v4']
    """
    return list(_load_chips())


def find_chip(kind: str) -> Chip | None:
    """Return the chip of a pod's kind, or None if chips.toml does not describe it.

    Args:
        kind: a short name, such as "v3", or the name that JAX gives the device.

    >>> find_chip("NVIDIA H200").kind, find_chip("TPU v5 lite").kind, find_chip("cpu")
    ('h200', 'v5e', None)
    """
    return _load_chips().get(_shorten_kind(kind))


def get_chip(kind: str) -> Chip:
    """Return the chip of a pod's kind.

    Raises:
        UserError: chips.toml does not describe this kind, so that no forecast is possible.
    """
    row = find_chip(kind)
    if row is None:
        raise UserError(f"nothing is known of the speed of chip kind {kind!r}: {suggest_names(kind, list_kinds())}")
    return row


def read_tables(package: str, name: str) -> JsonObject:
    """Read a TOML data file that ships with a package."""
    return tomllib.loads(resources.files(package).joinpath(name).read_text())


_JAX_NAMES = MappingProxyType({"tpu v5 lite": "v5e", "tpu v5": "v5p", "tpu v6 lite": "v6e"})


def _shorten_kind(kind: str) -> str:
    name = kind.lower()
    if name in _JAX_NAMES:
        return _JAX_NAMES[name]
    return next((part for part in name.replace("-", " ").split() if part in _load_chips()), name)


@functools.cache
def _load_chips() -> dict[str, Chip]:
    return {kind: _make_chip(kind, fields) for kind, fields in read_tables(__package__, "chips.toml").items()}


def _make_chip(kind: str, fields: JsonObject) -> Chip:
    clock = fields.pop("clock_hz", 1.0)
    curve = {images: count / clock for images, count in fields.pop("cycles", {}).items()} or fields.pop("seconds", {})
    points = sorted((int(images), float(seconds)) for images, seconds in curve.items())
    return Chip(kind=kind, points=tuple(points), **fields)
