"""Environment: on what, and by which code, something ran. For people who compare results, and for `podscale doctor`."""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

SOURCES = (".py", ".toml", ".css", ".js", ".html")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "PODSCALE_DECODER")


def facts(devices: list[Any]) -> dict[str, Any]:
    """This machine in names and numbers; nothing that tells whose it is."""
    kinds = sorted({str(device.device_kind) for device in devices})
    return {
        "system": platform.platform(terse=True),
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "accelerators": f"{len(devices)} x {', '.join(kinds)}",
        "settings": {name: os.environ[name] for name in FLAGS if os.environ.get(name)},
        "source": source_digest(),
    }


def source_digest() -> str:
    """Sixteen digits that change with any line of this package."""
    root, found = Path(__file__).parent, hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCES):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def processor() -> str:
    """The name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
