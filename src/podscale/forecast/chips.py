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
    closes: int = 1
    largest: int = 0
    node_rate: float = 0.0
    node_hop_s: float = 0.0
    slice_rate: float = 0.0
    slice_hop_s: float = 0.0
    points: tuple[tuple[int, float], ...] = ()  # (images per device, seconds per step), before `rate` sets their level
    update_s: float = 0.0  # of the optimizer, likewise; 0: the points contain it
    copy_s: float = 0.0  # of copying gradients into buckets and back, likewise
    layout_s: float = 0.0  # of laying out the images for the first layer, likewise
    kernels: int = 0
    gap_s: float = 0.0
    curve: str = ""
    rate: float = 0.0
    rate_images: int = 0
    rate_kernels: int = 0
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

    >>> find_chip("NVIDIA H200").kind, find_chip("NVIDIA A100-SXM4-80GB").kind, find_chip("cpu")
    ('h200', 'a100-80gb', None)
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
    if name in _load_chips():
        return name
    parts = name.replace("-", " ").split()
    kind = next((part for part in parts if part in _load_chips()), name)
    variants = [f"{kind}-{part}" for part in parts if f"{kind}-{part}" in _load_chips()]  # with another memory
    return variants[0] if variants else kind


@functools.cache
def _load_chips() -> dict[str, Chip]:
    tables = read_tables(__package__, "chips.toml")
    return {kind: _make_chip(kind, _complete_fields(fields, tables)) for kind, fields in tables.items()}


def _complete_fields(fields: JsonObject, tables: JsonObject) -> JsonObject:
    """Return a chip's fields with those of the chip that it is `like`, whose curve it borrows, except the rate."""
    like = fields.get("like")
    if not like:
        return dict(fields)
    own = {name: value for name, value in fields.items() if name != "like"}
    shared = {name: value for name, value in tables[like].items() if name not in ("rate", "rate_images")}
    return shared | own | {"curve": like}


def _make_chip(kind: str, fields: JsonObject) -> Chip:
    clock = fields.pop("clock_hz", 1.0)
    curve = {images: count / clock for images, count in fields.pop("cycles", {}).items()} or fields.pop("seconds", {})
    points = sorted((int(images), float(seconds)) for images, seconds in curve.items())
    others = {f"{part}_s": fields.pop(f"{part}_cycles", 0) / clock for part in ("update", "copy", "layout")}
    return Chip(kind=kind, points=tuple(points), **others, **fields)
