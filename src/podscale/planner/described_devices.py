"""Described: the devices of a pod that is not here, as its compiler describes them.

libtpu carries descriptions of every TPU topology; JAX's CUDA plugin compiles for any GPU whose figures it is given.
With either installed, `jax.experimental.topologies` names the devices of a whole pod on a laptop.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import jax
from jax.experimental import topologies

from podscale.errors import UserError
from podscale.forecast.chips import chip, known
from podscale.pod import THREE_DIMENSIONS, Pod, place

ALONE = "the model of time answers alone"
NO_LIBTPU = f"libtpu is not installed here (pip install 'podscale[tpu]'): {ALONE}"
NO_CUDA = f"JAX's CUDA plugin is not installed here (pip install 'podscale[cuda13]'): {ALONE}"
NO_COMPILER = f"there is no compiler for this kind of chip without the chip: {ALONE}"
# libtpu looks for the machine's own TPU, at length, and allows one process at a time, unless told not to.
_TPU_ALONE = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def why_not(where: Pod) -> str:
    """Why nothing can be compiled for the pod here; empty if it can."""
    row = known(where.kind)
    if row is None:
        return NO_COMPILER
    if row.torus:
        return "" if _installed("libtpu") else NO_LIBTPU
    return "" if _installed("jax_plugins.xla_cuda13") or _installed("jax_plugins.xla_cuda12") else NO_CUDA


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


def pod(where: Pod) -> Pod:
    """The pod with described devices, in the places where real ones would be."""
    leave_chips_alone()
    name = topology_name(where)
    try:
        with _silent():
            devices = _devices(where)
    except Exception as error:  # whatever the plugins raise: none of it has a type of its own
        raise UserError(f"the compiler knows no pod {name}: {first_line(error)}; try another shape") from None
    if len(devices) != where.size:
        raise UserError(f"the compiler's {name} has {len(devices)} devices, not {where.size}; try another shape")
    return replace(where, devices=tuple(sorted(devices, key=place)))


def topology_name(where: Pod) -> str:
    """The pod as its compiler calls it.

    TPU pods are named columns by rows, with a depth for the kinds whose torus has three dimensions; GPU clusters are
    nodes by GPUs.
    """
    if not chip(where.kind).torus:
        return f"1x{where.rows}x{where.cols}"
    x, y, *z = where.dims
    deep = z or [1] * (where.kind in THREE_DIMENSIONS)
    return f"{where.kind}:{'x'.join(map(str, (x, y, *deep)))}"


def compiler_options(where: Pod) -> dict[str, Any]:
    """Without a GPU nothing can be tried out: the compiler takes its default algorithms."""
    return {} if chip(where.kind).torus else {"xla_gpu_autotune_level": "0"}


def _devices(where: Pod) -> Any:
    name = topology_name(where)
    if chip(where.kind).torus:
        both = {"chip_config_name": "megacore"} if where.kind == "v4" else {}  # its two cores are one device
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **both).devices
    described = _gpu(where.kind)
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=name, target_config=described
    ).devices


def _gpu(kind: str) -> str:
    """A GPU's figures as XLA reads them: a GpuTargetConfigProto in text. What all kinds share stands here."""
    row = chip(kind)
    figures = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "shared_memory_per_block": 48 << 10,
        "registers_per_core_limit": 1 << 16,
        "registers_per_block_limit": 1 << 16,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "memory_bandwidth": int(row.memory_rate),
        "device_memory_size": row.memory_bytes,
    }
    figures |= {name: value for name, value in row.target.items() if name != "capability"}
    lines = [f"{name}: {value}" for name, value in figures.items()]
    major, minor = row.target["capability"]
    lines.append(f"cuda_compute_capability {{ major: {major} minor: {minor} }}")
    inside = " ".join(lines)
    return (
        f'gpu_device_info {{ {inside} }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} '
        f'device_description_str: "NVIDIA {kind.upper()}"'
    )


# --- the machine's own chips ---------------------------------------------------------------------------------------


def leave_chips_alone() -> None:
    """Has JAX run on the CPU, if it does not run yet: the machine's own chips have no part in this."""
    for name, value in _TPU_ALONE.items():
        os.environ.setdefault(name, value)
    with suppress(RuntimeError):  # JAX already runs: it has what it has
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")


@contextmanager
def _silent() -> Iterator[None]:
    """Without stderr: libtpu complains at length that the machine has no TPU."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def first_line(error: Exception) -> str:
    """The beginning of what a compiler says, for the end of a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
