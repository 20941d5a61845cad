"""Find incompatibilities on this machine: versions, drivers without their libraries, limits that are too low."""

import importlib.util
import os
import re
import resource
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from podscale.data import decode

MIN_FILES = 1024
MIN_DISK_BYTES = 10 << 30
GPU_FILES = ("/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg")
TPU_FILES = ("/dev/accel0", "/dev/vfio/0")


def find_problems(platform: str, folder: Path) -> list[str]:
    """Return the machine's problems, one sentence each, the most serious first.

    Args:
        platform: the platform that JAX uses.
        folder: its disk's free space is checked.
    """
    problems = [
        *find_unused_devices(platform),
        *find_version_conflicts(list_installed()),
        *find_old_versions(metadata.requires("podscale") or [], list_installed()),
        *_check_decoder(),
        *_check_limits(folder),
    ]
    return list(dict.fromkeys(problems))


def list_installed() -> dict[str, str]:
    """Return the version of every installed distribution, by its normalized name."""
    return {_normalize_name(d.metadata["Name"]): d.version for d in metadata.distributions() if d.metadata["Name"]}


def find_unused_devices(platform: str, exists: Callable[[str], bool] = os.path.exists) -> list[str]:
    """Return a sentence for each accelerator that the system has and JAX does not use."""
    problems = []
    if platform == "cpu" and any(map(exists, GPU_FILES)):
        problems.append("there is an NVIDIA GPU here, but JAX computes on the CPU; pip install 'podscale[cuda13]'")
    if platform == "cpu" and any(map(exists, TPU_FILES)):
        problems.append("there is a TPU here, but JAX computes on the CPU; pip install 'podscale[tpu]'")
    return problems


def find_version_conflicts(versions: dict[str, str]) -> list[str]:
    """Return a sentence for each part of JAX that is not of the same release.

    >>> find_version_conflicts({"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.9.0"})
    ['jax is 0.10.2 but jax-cuda13-plugin 0.9.0; install the same version of both']
    """
    ours = versions.get("jax", "")
    parts = [
        name for name in versions if name == "jaxlib" or re.fullmatch(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)", name)
    ]
    return [
        f"jax is {ours} but {name} {versions[name]}; install the same version of both"
        for name in sorted(parts)
        if _parse_release(versions[name]) != _parse_release(ours)
    ]


def find_old_versions(requirements: list[str], versions: dict[str, str]) -> list[str]:
    """Return a sentence for each library that is older than podscale requires.

    >>> find_old_versions(["jax>=0.10", "numpy>=2.0"], {"jax": "0.9.1", "numpy": "2.4"})
    ["jax is 0.9.1, but podscale needs 0.10 or newer; pip install --upgrade 'jax>=0.10'"]
    """
    problems = []
    for line in requirements:
        match = re.match(r"([\w.-]+)[^;]*?>=\s*([\d.]+)", line)
        if match is None or "extra" in line:
            continue
        name, least = _normalize_name(match[1]), match[2]
        if name in versions and _parse_release(versions[name]) < _parse_release(least):
            problem = f"{name} is {versions[name]}, but podscale needs {least} or newer"
            problems.append(f"{problem}; pip install --upgrade '{name}>={least}'")
    return problems


def _check_decoder() -> list[str]:
    kind = decode.select_decoder()
    return [] if kind == "native" else [f"photos are decoded by the {kind}, at less than half the rate"]


def _check_limits(folder: Path) -> list[str]:
    problems = []
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < MIN_FILES:
        problems.append(f"only {files} files may be open at once; raise it with `ulimit -n 4096`")
    free = shutil.disk_usage(folder).free
    if free < MIN_DISK_BYTES:
        problems.append(f"{folder.resolve()} has only {free / 2**30:.1f} GiB free; checkpoints need disk space")
    if importlib.util.find_spec("tensorboard") is None:
        problems.append("tensorboard is not installed; pip install tensorboard")
    return problems


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _parse_release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, without trailing zeros.

    >>> _parse_release("0.10.2.dev3"), _parse_release("2.0") == _parse_release("2")
    ((0, 10, 2), True)
    """
    numbers = [int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part]  # type: ignore[index]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
