"""Describe the host that this process runs on: processor, usable cores, usable memory."""

import os
import platform
from contextlib import suppress
from pathlib import Path


def read_processor_name() -> str:
    """Return the processor's name, as far as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def count_usable_cores() -> int:
    """Return how many cores this process may use; in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_usable_memory() -> int:
    """Return bytes of memory that this process may use: the machine's, or the container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdecimal() else total


def measure_run_delay() -> float:
    """Return seconds that this process's threads could have run and waited for a core; 0.0 where that is not known."""
    total_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, IndexError, ValueError):  # the thread has just ended
            total_ns += int(path.read_text().split()[1])
    return total_ns / 1e9
