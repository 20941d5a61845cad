"""Describe the machine and the code that produced a result: to compare results, and for `podscale doctor`."""

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podscale.config.json_types import JsonObject
from podscale.processes.host import count_usable_cores, find_version, measure_usable_memory, read_processor_name

if TYPE_CHECKING:
    import jax

SOURCES = (".py", ".toml", ".css", ".js", ".html")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "PODSCALE_DECODER")


def describe_machine(devices: Sequence["jax.Device"]) -> JsonObject:
    """Return names and numbers of this machine; nothing that identifies its owner.

    Args:
        devices: JAX devices in use.
    """
    kinds = sorted({str(device.device_kind) for device in devices})
    return {
        "system": platform.platform(terse=True),
        "processor": read_processor_name(),
        "cores": count_usable_cores(),
        "memory_bytes": measure_usable_memory(),
        "accelerators": f"{len(devices)} x {', '.join(kinds)}",
        "settings": {name: os.environ[name] for name in FLAGS if os.environ.get(name)},
        "source": compute_source_digest(),
    }


def compute_source_digest() -> str:
    """Return sixteen hex digits that change with any line of this package."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCES):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


LIBRARIES = ("podscale", "jax", "jaxlib", "flax", "optax", "numpy", "pillow")


def list_library_versions() -> dict[str, str]:
    """Return versions of Python and of the libraries on which the bits of a result depend."""
    return {"python": platform.python_version()} | {name: find_version(name) or "not installed" for name in LIBRARIES}
