"""Describe the host that this process runs on: processor, usable cores and memory, installed packages."""

import ctypes
import os
import platform
import resource
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from podscale.errors import UserError

MIN_DESCRIPTORS = 256  # files that a training has open at once, with some to spare


def find_version(package: str) -> str:
    """Return the version of an installed package; empty if there is none, as of a checkout that is only on the path."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def read_processor_name() -> str:
    """Return the processor's name, as far as the system knows it."""
    return _read_processor().get("model name") or platform.processor() or platform.machine()


def describe_cpu() -> str:
    """Return what a program that is compiled for this machine's processor depends on: its features, and the cores."""
    facts = _read_processor()
    features = facts.get("flags") or facts.get("Features", "")
    return f"{platform.machine()} {read_processor_name()} {count_usable_cores()} {features}"


def _read_processor() -> dict[str, str]:
    """Return what Linux says about the first core; nothing elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def count_usable_cores() -> int:
    """Return how many cores this process may use; in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_usable_memory() -> int:
    """Return bytes of memory that this process may use: the machine's, or the container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdecimal() else total


def require_descriptors(least: int = MIN_DESCRIPTORS) -> None:
    """Raise this process's limit on open files to what it needs: Python and JAX fail in many ways without.

    Args:
        least: how many it needs.

    Raises:
        UserError: its limit is lower, and it may not raise it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= least:
        return
    if hard != resource.RLIM_INFINITY and hard < least:
        raise UserError(
            f"this process may open {hard} files only, and needs {least}; raise its limit, as `ulimit -n 4096` does"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))


def measure_run_delay() -> float:
    """Return seconds that this process's threads could have run and waited for a core; 0.0 where that is not known."""
    total_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, IndexError, ValueError):  # the thread has just ended
            total_ns += int(path.read_text().split()[1])
    return total_ns / 1e9


def trim_memory() -> None:
    """Give memory that is free back to the system, where the C library can (glibc)."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
