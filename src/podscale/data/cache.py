"""Cache: a host's pictures kept in memory, encoded or decoded, so that later passes need not read or decode them again.

A cache never changes a pixel. Every sample has its place from the start, since the index knows all lengths and sizes;
memory is taken as places are filled. Nothing is ever thrown out: a pass visits each sample once, in an order of its
own, so whatever one threw out would be missed as soon as what one kept.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["encoded", "decoded"]
ALIGNMENT = 64
FREE_SHARE = 0.5  # of the memory that is free, which a cache may take unless told otherwise


@dataclass(frozen=True, eq=False)
class Cache:
    """Places for some samples of an index, as bytes of files or as pixels.

    >>> cache = Cache.of("encoded", np.array([3, 5, 4]), np.array([0, 2]))
    >>> cache.put(2, b"abcd")
    >>> cache.missing(np.array([0, 2])).tolist(), bytes(cache.at(2))
    ([0], b'abcd')
    """

    kind: Kind
    lengths: NDArray[np.int64]  # of every sample of the index
    places: NDArray[np.int64]  # where it begins; -1: it has no place here
    filled: NDArray[np.bool_]
    memory: NDArray[np.uint8]

    @classmethod
    def of(cls, kind: Kind, lengths: NDArray[np.integer], samples: NDArray[np.integer]) -> "Cache":
        """An empty cache for `samples`; `lengths` are the bytes of every sample of the index."""
        wide = np.asarray(lengths, np.int64)
        taken = _padded(wide[samples])
        places = np.full(len(wide), -1, np.int64)
        places[samples] = np.cumsum(taken) - taken
        return cls(kind, wide, places, np.zeros(len(wide), bool), np.empty(int(taken.sum()), np.uint8))

    def missing(self, samples: NDArray[np.integer]) -> NDArray[np.int64]:
        """Which of the samples must be put here first."""
        return np.unique(samples[~self.filled[samples]]).astype(np.int64)

    def put(self, sample: int, data: bytes | NDArray[np.uint8]) -> None:
        """Fills a sample's place. Two threads may fill the same one at once: with the same bytes."""
        values = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1)
        self.at(sample)[:] = values
        self.filled[sample] = True

    def at(self, sample: int) -> NDArray[np.uint8]:
        """A sample's bytes, as one row."""
        place = int(self.places[sample])
        if place < 0:
            raise ValueError(f"sample {sample} has no place in this cache")
        return self.memory[place : place + int(self.lengths[sample])]


def choose(wanted: str, encoded_bytes: int, decoded_bytes: int, limit: int, passes: float) -> Kind | None:
    """What a cache of at most `limit` bytes shall hold. Filling one costs about a pass, so one pass has none.

    >>> choose("auto", 100, 700, 1000, passes=90), choose("auto", 100, 700, 500, 90), choose("auto", 100, 700, 50, 90)
    ('decoded', 'encoded', None)
    """
    if wanted == "none" or passes <= 1:
        return None
    if wanted in ("auto", "decoded") and decoded_bytes <= limit:
        return "decoded"
    if wanted in ("auto", "encoded") and encoded_bytes <= limit:
        return "encoded"
    return None


def room(lengths: NDArray[np.integer]) -> int:
    """Bytes that a cache of samples of these lengths takes."""
    return int(_padded(np.asarray(lengths, np.int64)).sum())


def free_bytes() -> int:
    """Memory that this process may still take: the machine's, or its container's if that is less."""
    found = [_available()]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limits = [_number(limit), _number(used)]
        if None not in limits:
            found.append(max(0, limits[0] - limits[1]))  # type: ignore[operator]
    return min(found)


def _padded(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return (lengths + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 4 << 30  # a machine that does not say; a laptop has as much


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # not there, or "max": no limit
        return None
