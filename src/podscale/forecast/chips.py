"""Chips: what is known of each kind of hardware, read from `chips.toml`, where every row names its source."""

import functools
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError


@dataclass(frozen=True)
class Chip:
    """One row of chips.toml; see there for what each field means."""

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
    points: tuple[tuple[int, float], ...] = ()  # (images a device, seconds a step), before `rate` sets their level
    curve: str = ""
    rate: float = 0.0
    rate_images: int = 0
    target: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def torus(self) -> bool:
        """Whether its links make a torus; else there are nodes of `chips_per_host` behind a switch."""
        return self.axes > 0


def kinds() -> list[str]:
    """The kinds that there are rows for.

    >>> kinds()[:3]
    ['v2', 'v3', 'v4']
    """
    return list(_table())


def known(kind: str) -> Chip | None:
    """The row for a pod's kind: a short name, or the name that JAX gives the device; None where there is none.

    >>> known("NVIDIA H200").kind, known("TPU v5 lite").kind, known("cpu")
    ('h200', 'v5e', None)
    """
    return _table().get(_short(kind))


def chip(kind: str) -> Chip:
    """The row for a pod's kind; a kind without one cannot be forecast."""
    found = known(kind)
    if found is None:
        raise UserError(f"nothing is known of the speed of chip kind {kind!r}: {suggest_names(kind, kinds())}")
    return found


def read_tables(package: str, name: str) -> dict[str, Any]:
    """Read a TOML data file that is shipped with a package."""
    return tomllib.loads(resources.files(package).joinpath(name).read_text())


_JAX_NAMES = {"tpu v5 lite": "v5e", "tpu v5": "v5p", "tpu v6 lite": "v6e"}


def _short(kind: str) -> str:
    name = kind.lower()
    if name in _JAX_NAMES:
        return _JAX_NAMES[name]
    return next((word for word in name.replace("-", " ").split() if word in _table()), name)


@functools.cache
def _table() -> dict[str, Chip]:
    return {kind: _read(kind, fields) for kind, fields in read_tables(__package__, "chips.toml").items()}


def _read(kind: str, fields: dict[str, Any]) -> Chip:
    clock = fields.pop("clock_hz", 1.0)
    curve = {images: count / clock for images, count in fields.pop("cycles", {}).items()} or fields.pop("seconds", {})
    points = sorted((int(images), float(seconds)) for images, seconds in curve.items())
    return Chip(kind=kind, points=tuple(points), **fields)
