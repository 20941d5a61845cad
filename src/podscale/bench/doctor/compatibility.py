"""What does not fit together on this machine: versions, drivers without their libraries, limits that are too low."""

import importlib.util
import os
import re
import resource
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from podscale.data import decode

FEW_FILES = 1024
LITTLE_DISK = 10 << 30
GPU_FILES = ("/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg")
TPU_FILES = ("/dev/accel0", "/dev/vfio/0")


def problems(platform: str, folder: Path) -> list[str]:
    """One sentence each, the gravest first; `platform` is the one that JAX computes on."""
    found = [
        *unused_devices(platform),
        *disagreeing_versions(installed()),
        *old_versions(metadata.requires("podscale") or [], installed()),
        *_decoder(),
        *_limits(folder),
    ]
    return list(dict.fromkeys(found))


def installed() -> dict[str, str]:
    """Every distribution that Python sees, by its normal name, and its version."""
    return {_normal(d.metadata["Name"]): d.version for d in metadata.distributions() if d.metadata["Name"]}


def unused_devices(platform: str, exists: Any = os.path.exists) -> list[str]:
    """Accelerators that the system shows and JAX does not use."""
    found = []
    if platform == "cpu" and any(map(exists, GPU_FILES)):
        found.append("there is an NVIDIA GPU here, but JAX computes on the CPU; pip install 'podscale[cuda13]'")
    if platform == "cpu" and any(map(exists, TPU_FILES)):
        found.append("there is a TPU here, but JAX computes on the CPU; pip install 'podscale[tpu]'")
    return found


def disagreeing_versions(versions: dict[str, str]) -> list[str]:
    """Parts of JAX that are not of the same release.

    >>> disagreeing_versions({"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.9.0"})
    ['jax is 0.10.2 but jax-cuda13-plugin 0.9.0; install the same version of both']
    """
    ours = versions.get("jax", "")
    parts = [
        name for name in versions if name == "jaxlib" or re.fullmatch(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)", name)
    ]
    return [
        f"jax is {ours} but {name} {versions[name]}; install the same version of both"
        for name in sorted(parts)
        if _release(versions[name]) != _release(ours)
    ]


def old_versions(requirements: list[str], versions: dict[str, str]) -> list[str]:
    """Libraries that are older than podscale needs them.

    >>> old_versions(["jax>=0.10", "numpy>=2.0"], {"jax": "0.9.1", "numpy": "2.4"})
    ["jax is 0.9.1, but podscale needs 0.10 or newer; pip install --upgrade 'jax>=0.10'"]
    """
    found = []
    for line in requirements:
        match = re.match(r"([\w.-]+)[^;]*?>=\s*([\d.]+)", line)
        if match is None or "extra" in line:
            continue
        name, least = _normal(match[1]), match[2]
        if name in versions and _release(versions[name]) < _release(least):
            told = f"{name} is {versions[name]}, but podscale needs {least} or newer"
            found.append(f"{told}; pip install --upgrade '{name}>={least}'")
    return found


def _decoder() -> list[str]:
    kind = decode.decoder()
    return [] if kind == "native" else [f"photos are decoded by the {kind}, at less than half the rate"]


def _limits(folder: Path) -> list[str]:
    found = []
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < FEW_FILES:
        found.append(f"only {files} files may be open at once; raise it with `ulimit -n 4096`")
    free = shutil.disk_usage(folder).free
    if free < LITTLE_DISK:
        found.append(f"{folder.resolve()} has only {free / 2**30:.1f} GiB free; checkpoints need room")
    if importlib.util.find_spec("tensorboard") is None:
        found.append("tensorboard is not installed; pip install tensorboard")
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, as far as they are numbers, without zeros at the end.

    >>> _release("0.10.2.dev3"), _release("2.0") == _release("2")
    ((0, 10, 2), True)
    """
    numbers = [int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part]  # type: ignore[index]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
