"""Options of the machine's side of a run; none of them changes what is learnt.

They are separate from the modules that use them so that `--help` can list them without importing JAX.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_type_hints

from podscale.config.fields import check_type
from podscale.config.fields import document_field as _field
from podscale.errors import UserError

TileSummation = Literal["auto", "xla", "swing_latency"]


@dataclass(frozen=True)
class PodOptions:
    """Which devices, and how they are laid out."""

    shape: str = _field("", "rows x columns of the available devices, such as 2x4; of each slice, if there are several")
    virtual: str = _field("", "simulate this many devices on the CPU, such as 2x2, or 2x2*2 for two slices")
    cores: int = _field(0, "devices per chip; on CPUs, devices in each process; 0: as the hardware says")
    heartbeat_s: float = _field(
        60.0, "seconds without a heartbeat before a process is considered lost and the run ends"
    )


@dataclass(frozen=True)
class Options:
    """How the recipe is mapped onto the pod; zeros and "auto" leave it to the plan.

    Args: the fields; each has a line of documentation in its metadata, which `--help` and docs/recipes.md show.

    >>> Options(summation="torus", micro_batches=2).payload
    'float32'
    """

    summation: Literal["auto", "xla", "ring", "ring2", "torus", "torus4", "swing", "swing_latency", "sharded"] = _field(
        "auto", "how gradients are summed"
    )
    payload: Literal["float32", "bfloat16"] = _field("float32", "data type in which gradients are communicated")
    bucket_mib: int = _field(
        -1, "gradients are sent in buckets of this size; 0: all in one; -1: chosen with the summation"
    )
    tile_summation: Literal["auto", "xla", "swing_latency"] = _field(
        "auto", "how batch norm sums over tiles of devices; auto: xla, or swing_latency between CPUs if timed as faster"
    )
    micro_batches: int = _field(0, "micro-batches per device and update; 0: as few as fit the memory")
    steps_per_call: int = _field(0, "updates per call of the compiled program; 0: chosen by device")
    eval_images: int = _field(0, "images per device and evaluation step; 0: as in training")
    cache: Literal["auto", "none", "encoded", "decoded", "device"] = _field(
        "auto",
        "where images are cached: after the first pass in the hosts' memory, or from the start on every device; "
        "auto: on the devices if they need only a small share of GPU or TPU memory; "
        "otherwise in the hosts' memory, decoded if they fit, else encoded",
    )
    cache_gib: float = _field(0.0, "memory for the cache on each host; 0: half of what is free")
    save_steps: int = _field(0, "updates between checkpoints, besides those at every evaluation; 0: only those")
    timeout_s: float = _field(1800.0, "seconds without progress after which a run counts as stuck and ends; 0: never")
    check_steps: int = _field(100, "updates between comparisons of all devices' parameters; 0: never")
    fused: Literal["auto", "on", "off"] = _field(
        "auto",
        "fuse batch norm, ReLU and convolution of ResNets; auto: those with 1x1 convolutions in "
        "bfloat16, on GPUs that have kernels for it (Hopper), when training is long enough to amortize the "
        "compilation; attention of Vision Transformers in bfloat16 as one kernel, on any GPU; "
        "their layer norms and GELU, and ConvNeXt's, as kernels, in bfloat16 on Hopper GPUs; there also the sums of "
        "batch norms of ResNets that are not fused, with on those of all networks",
    )
    remat: Literal["auto", "on", "off"] = _field(
        "auto",
        "recompute activations in the backward pass, as model.remat does; "
        "auto: where the step does not fit the memory otherwise",
    )
    deterministic: bool = _field(False, "bit-identical results on GPUs, also after resuming; slower")
    keep: int = _field(2, "number of newest checkpoints to keep, besides the best one; at least 1")
    orthogonalize: Literal["auto", "device", "row", "slice", "pod"] = _field(
        "auto",
        "which devices share the orthogonalization of muon's matrices: those of a row, a slice or the pod; "
        "device: each does all; auto: what the forecast says is fastest (with summation sharded always the pod)",
    )


def set_summation(options: Options, name: str, bucket_mib: int) -> Options:
    """Return the options with summation and bucket size decided; programs may have added the name."""
    decided: dict[str, Any] = {"summation": name, "bucket_mib": bucket_mib}
    return replace(options, **decided)


def check_options(options: Options) -> None:
    """Refuse options that are of another type, none of the choices, or out of range: a program may set anything.

    Raises:
        UserError: the message names the option, the range and the value.
    """
    for field, kind in get_type_hints(Options).items():
        value = getattr(options, field)
        check_type(f"plan.{field}", value, str if field == "summation" else kind)  # a summation may be by size
        least = -1 if field == "bucket_mib" else 0
        if isinstance(value, int | float) and value < least:
            raise UserError(f"plan.{field} must be {least} or more, not {value}")
