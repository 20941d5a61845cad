"""Trace: what `jax.profiler` saw of a device's work, as seconds by instruction and seconds without any."""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from podscale.errors import UserError

Piece = tuple[str, str, float, float]  # instruction, kernel, start and end in seconds


@dataclass(frozen=True)
class Seen:
    """By the names of instructions, the seconds of each and how often it ran; the seconds in which the device worked at
    all; and the whole time."""

    seconds: dict[str, float]
    runs: dict[str, int]
    busy_s: float
    whole_s: float

    @property
    def idle_s(self) -> float:
        """Between the first piece of work and the last, the time without any."""
        return max(0.0, self.whole_s - self.busy_s)


def watch(work: Callable[[], Any], device: jax.Device) -> Seen:
    """Does `work` under the profiler and tells what the device did."""
    with tempfile.TemporaryDirectory(prefix="podscale-trace-") as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(work())
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise UserError("jax.profiler wrote no trace; it cannot be told where the time went")
        return seen(_events(ProfileData.from_file(str(files[0])), device))


def _events(data: ProfileData, device: jax.Device) -> Iterable[Piece]:
    """Every piece of the device's work."""
    wanted = (
        "/host:CPU" if device.platform == "cpu" else f"/device:{device.platform.upper()}:{device.local_hardware_id}"
    )
    for plane in data.planes:
        if plane.name != wanted:
            continue
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name and event.duration_ns:
                    yield str(name), event.name, event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9


def seen(pieces: Iterable[Piece]) -> Seen:
    """Sums over pieces of work; where several overlap, the device is busy once.

    An instruction may be several kernels, each of which runs as often as it does.

    >>> found = seen([("a", "k1", 0.0, 2.0), ("a", "k2", 1.0, 3.0), ("b", "k3", 5.0, 6.0), ("b", "k3", 6.0, 7.0)])
    >>> found.seconds, found.runs, found.busy_s, found.whole_s, found.idle_s
    ({'a': 4.0, 'b': 2.0}, {'a': 1, 'b': 2}, 5.0, 7.0, 2.0)
    """
    ordered = sorted(pieces, key=lambda piece: piece[2])
    if not ordered:
        raise UserError("the profiler saw no work of this device; it cannot be told where the time went")
    seconds: dict[str, float] = defaultdict(float)
    kernels: dict[str, Counter[str]] = defaultdict(Counter)
    busy, until = 0.0, ordered[0][2]
    for name, kernel, start, end in ordered:
        seconds[name] += end - start
        kernels[name][kernel] += 1
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    runs = {name: min(counts.values()) for name, counts in kernels.items()}
    return Seen(dict(seconds), runs, busy, until - ordered[0][2])
