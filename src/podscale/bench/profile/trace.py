"""Profile a device's work with `jax.profiler`: seconds by instruction, and idle seconds."""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData

from podscale.errors import UserError

DeviceEvent = tuple[str, str, float, float]  # instruction, kernel, start and end in seconds


@dataclass(frozen=True)
class DeviceActivity:
    """Seconds and number of runs by name of instruction, the device's busy seconds, and the whole time."""

    seconds: dict[str, float]
    runs: dict[str, int]
    busy_s: float
    whole_s: float

    @property
    def idle_s(self) -> float:
        """The time without work between the first event and the last."""
        return max(0.0, self.whole_s - self.busy_s)


def profile_device(work: Callable[[], object], device: jax.Device) -> DeviceActivity:
    """Run `work` under the profiler and return what the device did.

    Raises:
        UserError: the profiler recorded nothing.
    """
    with tempfile.TemporaryDirectory(prefix="podscale-trace-") as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(work())
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise UserError("jax.profiler wrote no trace, so there is no breakdown of the time")
        return summarize_events(_read_events(ProfileData.from_file(str(files[0])), device))


def _read_events(data: ProfileData, device: jax.Device) -> Iterable[DeviceEvent]:
    """Yield every event of the device's work."""
    plane_name = (
        "/host:CPU" if device.platform == "cpu" else f"/device:{device.platform.upper()}:{device.local_hardware_id}"
    )
    for plane in data.planes:
        if plane.name != plane_name:
            continue
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name and event.duration_ns:
                    yield str(name), event.name, event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9


def summarize_events(events: Iterable[DeviceEvent]) -> DeviceActivity:
    """Sum over events; where several overlap, the device counts as busy once.

    An instruction may consist of several kernels, each of which runs as often as the instruction.

    >>> events = [("a", "k1", 0.0, 2.0), ("a", "k2", 1.0, 3.0), ("b", "k3", 5.0, 6.0), ("b", "k3", 6.0, 7.0)]
    >>> activity = summarize_events(events)
    >>> activity.seconds, activity.runs, activity.busy_s, activity.whole_s, activity.idle_s
    ({'a': 4.0, 'b': 2.0}, {'a': 1, 'b': 2}, 5.0, 7.0, 2.0)
    """
    ordered = sorted(events, key=lambda event: event[2])
    if not ordered:
        raise UserError("the profiler recorded no work of this device, so there is no breakdown of the time")
    seconds: dict[str, float] = defaultdict(float)
    kernels: dict[str, Counter[str]] = defaultdict(Counter)
    busy, until = 0.0, ordered[0][2]
    for name, kernel, start, end in ordered:
        seconds[name] += end - start
        kernels[name][kernel] += 1
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    runs = {name: min(counts.values()) for name, counts in kernels.items()}
    return DeviceActivity(dict(seconds), runs, busy, until - ordered[0][2])
