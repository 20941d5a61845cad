"""Environment: on what, and by which code, something ran. For people who compare results, and for `podscale doctor`."""

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from podscale.processes.host import memory_bytes, processor_name, usable_cores

SOURCES = (".py", ".toml", ".css", ".js", ".html")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "PODSCALE_DECODER")


def facts(devices: list[Any]) -> dict[str, Any]:
    """This machine in names and numbers; nothing that tells whose it is."""
    kinds = sorted({str(device.device_kind) for device in devices})
    return {
        "system": platform.platform(terse=True),
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "accelerators": f"{len(devices)} x {', '.join(kinds)}",
        "settings": {name: os.environ[name] for name in FLAGS if os.environ.get(name)},
        "source": source_digest(),
    }


def source_digest() -> str:
    """Sixteen digits that change with any line of this package."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCES):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


LIBRARIES = ("podscale", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pillow")


def library_versions() -> dict[str, str]:
    """The libraries on which the bits of a result depend."""
    return {"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str:
    """Of a package as it was installed; one that is only on the path, as a checkout may be, has none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
