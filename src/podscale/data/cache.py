"""Cache: a host's pictures kept in memory, encoded or decoded, so that later passes need not read or decode them again.

A cache never changes a pixel. Every sample has its place from the start, since the index knows all lengths and sizes;
memory is taken as places are filled. Nothing is ever thrown out: a pass visits each sample once, in an order of its
own, so whatever one threw out would be missed as soon as what one kept.
"""

from collections.abc import Iterator
from contextlib import suppress
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


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: the machine's, or less where a control group of its allows less.

    Files that the kernel keeps in memory for later count as free, as they do for the machine as a whole.
    """
    return min([_available(root), *(left for group in _groups(root) if (left := _left(group)) is not None)])


def _padded(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return (lengths + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _available(root: Path) -> int:
    try:
        return _numbers(root / "proc/meminfo")["MemAvailable:"] << 10
    except (OSError, KeyError):
        return 4 << 30  # a machine that does not say; a laptop has as much


def _groups(root: Path) -> Iterator[Path]:
    """The control groups that bound this process's memory, and all groups around them, where a container shows them."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            below = Path(path.lstrip("/"))
            yield from (top / part for part in (below, *below.parents))


def _left(group: Path) -> int | None:
    """What a control group may still take; None where it has no limit."""
    for limit, used, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with suppress(OSError, ValueError):  # not there, or "max": no limit
            room = int((group / limit).read_text()) - int((group / used).read_text())
            kept = _numbers(group / "memory.stat")
            return max(0, room + sum(kept.get(f"{prefix}{age}_file", 0) for age in ("active", "inactive")))
    return None


def _numbers(path: Path) -> dict[str, int]:
    """The lines "name number ..." of a file."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
