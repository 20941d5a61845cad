"""Describe the topology and devices of a pod that is not available, so that its compiler can compile for them.

libtpu contains descriptions of every TPU topology; JAX's CUDA plugin compiles for any GPU whose figures it is given.
With either installed, `jax.experimental.topologies` gives the devices of a whole pod on a laptop.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType

import jax
from jax.experimental import topologies

from podscale.errors import UserError, get_first_line
from podscale.forecast.chips import find_chip, get_chip
from podscale.pod import THREE_DIMENSIONS, Pod, get_position
from podscale.training.step import CompilerOptions

FORECAST_ONLY = "the model of time answers alone"
NO_LIBTPU = f"libtpu is not installed here (pip install 'podscale[tpu]'): {FORECAST_ONLY}"
NO_CUDA = f"JAX's CUDA plugin is not installed here (pip install 'podscale[cuda13]'): {FORECAST_ONLY}"
NO_COMPILER = f"there is no compiler for this kind of chip without the chip: {FORECAST_ONLY}"
MAX_REASON_CHARS = 200  # of an error of the compiler
# Without these, libtpu searches for a local TPU, which takes long, and allows one process at a time.
_TPU_ENVIRONMENT = MappingProxyType({"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"})


def explain_no_compiler(pod: Pod) -> str:
    """Return why nothing can be compiled for the pod on this machine; empty if it can."""
    row = find_chip(pod.kind)
    if row is None:
        return NO_COMPILER
    if row.is_torus:
        return "" if _is_installed("libtpu") else NO_LIBTPU
    return "" if _is_installed("jax_plugins.xla_cuda13") or _is_installed("jax_plugins.xla_cuda12") else NO_CUDA


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed either
        return False


def describe_pod(pod: Pod) -> Pod:
    """Return the pod with described devices in place of real ones.

    Raises:
        UserError: the compiler does not know this pod.
    """
    use_cpu_backend()
    name = name_topology(pod)
    try:
        with _silence_stderr():
            devices = _describe_devices(pod)
    except Exception as error:  # the plugins raise no exception type of their own
        raise UserError(f"the compiler knows no pod {name}: {shorten_reason(error)}; try another shape") from None
    if len(devices) != pod.size:
        raise UserError(f"the compiler's {name} has {len(devices)} devices, not {pod.size}; try another shape")
    return replace(pod, devices=tuple(sorted(devices, key=get_position)))


def name_topology(pod: Pod) -> str:
    """Return the name that the compiler gives the pod.

    TPU pods are named columns by rows, with a depth for the kinds whose torus has three dimensions; GPU clusters are
    nodes by GPUs.
    """
    if not get_chip(pod.kind).is_torus:
        return f"1x{pod.rows}x{pod.cols}"
    x, y, *z = pod.dims
    depth = z or [1] * (pod.kind in THREE_DIMENSIONS)
    return f"{pod.kind}:{'x'.join(map(str, (x, y, *depth)))}"


def get_compiler_options(pod: Pod) -> CompilerOptions:
    """Return the compiler options for the pod: without a GPU no algorithm can be tried, so autotuning is off."""
    return {} if get_chip(pod.kind).is_torus else {"xla_gpu_autotune_level": "0"}


def _describe_devices(pod: Pod) -> Sequence[jax.Device]:
    name = name_topology(pod)
    if get_chip(pod.kind).is_torus:
        config = {"chip_config_name": "megacore"} if pod.kind == "v4" else {}  # its two cores are one device
        several = {"num_slices": pod.slices} if pod.slices > 1 else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **config, **several).devices
    target = _format_gpu_target(pod.kind)
    return topologies.get_topology_desc(platform="cuda", topology_name="", topology=name, target_config=target).devices


def _format_gpu_target(kind: str) -> str:
    """Return a GPU's figures as XLA reads them, a GpuTargetConfigProto in text; figures of all kinds are set here."""
    row = get_chip(kind)
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


# --- local devices -------------------------------------------------------------------------------------------------


def use_cpu_backend() -> None:
    """Make JAX use the CPU, if it has not started yet: the local accelerators are not needed."""
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with suppress(RuntimeError):  # JAX has already started its backend
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Discard stderr: libtpu complains at length that the machine has no TPU."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def shorten_reason(error: Exception) -> str:
    """Return the first line of an error of the compiler, shortened, to end a sentence with."""
    return get_first_line(error, MAX_REASON_CHARS).rstrip(".")
