"""Cache: a host's images in memory, encoded or decoded, so that later passes need not read or decode them again.

A cache never changes a pixel. Every sample has its offset from the start, since the index knows all lengths and sizes;
the memory is used up only as samples arrive. Nothing is ever evicted: a pass visits each sample once, in a new order,
so an evicted sample would be needed again as soon as any that stayed.
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
DEFAULT_MEMORY_SHARE = 0.5  # of the free memory, which a cache may use if no limit is set


@dataclass(frozen=True, eq=False)
class Cache:
    """Memory for some samples of an index, as bytes of files or as pixels.

    >>> cache = Cache.allocate("encoded", np.array([3, 5, 4]), np.array([0, 2]))
    >>> cache.put(2, b"abcd")
    >>> cache.find_missing(np.array([0, 2])).tolist(), bytes(cache.get(2))
    ([0], b'abcd')
    """

    kind: Kind
    lengths: NDArray[np.int64]  # bytes of every sample of the index
    offsets: NDArray[np.int64]  # where each sample begins; -1 where it is not part of this cache
    is_filled: NDArray[np.bool_]
    memory: NDArray[np.uint8]

    @classmethod
    def allocate(cls, kind: Kind, lengths: NDArray[np.integer], samples: NDArray[np.integer]) -> "Cache":
        """Return an empty cache for `samples`; `lengths` are the bytes of every sample of the index."""
        all_lengths = np.asarray(lengths, np.int64)
        padded = _pad_lengths(all_lengths[samples])
        offsets = np.full(len(all_lengths), -1, np.int64)
        offsets[samples] = np.cumsum(padded) - padded
        memory = np.empty(int(padded.sum()), np.uint8)
        return cls(kind, all_lengths, offsets, np.zeros(len(all_lengths), bool), memory)

    def find_missing(self, samples: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return those of the samples that must be put here first."""
        return np.unique(samples[~self.is_filled[samples]]).astype(np.int64)

    def put(self, sample: int, data: bytes | NDArray[np.uint8]) -> None:
        """Store a sample's bytes. Two threads may store the same sample at once, with the same bytes."""
        values = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1)
        self.get(sample)[:] = values
        self.is_filled[sample] = True

    def get(self, sample: int) -> NDArray[np.uint8]:
        """Return a sample's bytes, as one row that shares the cache's memory."""
        offset = int(self.offsets[sample])
        if offset < 0:
            raise ValueError(f"sample {sample} has no place in this cache")
        return self.memory[offset : offset + int(self.lengths[sample])]


def choose_kind(option: str, encoded_bytes: int, decoded_bytes: int, limit: int, passes: float) -> Kind | None:
    """Return what a cache of at most `limit` bytes holds, or None for no cache.

    Filling a cache costs about one pass, so training of a single pass has none.

    Args:
        option: "auto", "none", "encoded" or "decoded" (`--cache`).
        encoded_bytes: bytes of all samples as files.
        decoded_bytes: bytes of all samples as pixels.
        limit: most bytes of the cache.
        passes: passes over the samples.

    >>> [choose_kind("auto", 100, 700, limit, passes=90) for limit in (1000, 500, 50)]
    ['decoded', 'encoded', None]
    """
    if option == "none" or passes <= 1:
        return None
    if option in ("auto", "decoded") and decoded_bytes <= limit:
        return "decoded"
    if option in ("auto", "encoded") and encoded_bytes <= limit:
        return "encoded"
    return None


def compute_cache_bytes(lengths: NDArray[np.integer]) -> int:
    """Return the bytes that a cache of samples of these lengths takes."""
    return int(_pad_lengths(np.asarray(lengths, np.int64)).sum())


def measure_free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still use: the machine's, or fewer where a control group allows fewer.

    Files that the kernel caches in memory count as free, as they do for the machine as a whole.
    """
    remaining = (_read_group_memory(group) for group in _list_control_groups(root))
    return min([_read_available_memory(root), *(size for size in remaining if size is not None)])


def _pad_lengths(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return (lengths + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _read_available_memory(root: Path) -> int:
    try:
        return _parse_numbers(root / "proc/meminfo")["MemAvailable:"] << 10
    except (OSError, KeyError):
        return 4 << 30  # the machine does not report it; a laptop has as much


def _list_control_groups(root: Path) -> Iterator[Path]:
    """Yield the control groups that limit this process's memory and all their parents, where a container shows them."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            group = Path(path.lstrip("/"))
            yield from (top / part for part in (group, *group.parents))


def _read_group_memory(group: Path) -> int | None:
    """Return the bytes that a control group may still use; None where it has no limit."""
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with suppress(OSError, ValueError):  # the file does not exist, or says "max": no limit
            unused = int((group / limit).read_text()) - int((group / usage).read_text())
            statistics = _parse_numbers(group / "memory.stat")
            return max(0, unused + sum(statistics.get(f"{prefix}{age}_file", 0) for age in ("active", "inactive")))
    return None


def _parse_numbers(path: Path) -> dict[str, int]:
    """Parse the lines "name number ..." of a file."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {fields[0]: int(fields[1]) for fields in lines if len(fields) > 1 and fields[1].isdecimal()}
