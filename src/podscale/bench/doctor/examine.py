"""All of it, one part after the other, and in words."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from podscale.bench.doctor import compatibility, rates, verdict
from podscale.data import decode
from podscale.errors import UserError
from podscale.pod import Pod
from podscale.runs import environment
from podscale.runs.environment import library_versions


def examine(pod: Pod, folder: Path = Path(), tell: Callable[[str], object] = lambda part: None) -> dict[str, Any]:
    """What this machine can do. `tell` hears what is measured next; files are written to `folder`, and removed."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; name one that data or runs will be in with --path")
    began = time.perf_counter()
    mine = [d for d in pod.devices if d.process_index == jax.process_index()]
    stats = mine[0].memory_stats() or {}
    found: dict[str, Any] = {
        "devices": {
            "platform": mine[0].platform,
            "kind": mine[0].device_kind,
            "count": pod.size,
            "shape": pod.shape,
            "hosts": pod.hosts,
            "memory_bytes": pod.memory_bytes,
            "used_bytes": int(stats.get("bytes_in_use", 0)),
        }
    }
    parts: dict[str, Callable[[], Any]] = {
        "device": lambda: rates.device(pod),
        "links": lambda: rates.links(pod),
        "decoding": lambda: rates.decoding(folder) | {"decoder": decode.decoder()},
        "disk": lambda: rates.disk(folder),
        "problems": lambda: compatibility.problems(mine[0].platform, folder),
    }
    for name, measure in parts.items():
        tell(name)
        found[name] = measure()
    alone = verdict.limits(found)
    return found | {
        "environment": environment.facts(mine),
        "versions": library_versions(),
        "images_per_s": alone,
        "bottleneck": verdict.bottleneck(alone),
        "verdict": verdict.sentence(alone, found["problems"]),
        "seconds": time.perf_counter() - began,
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The same as names and values, for people."""
    devices, device, machine = found["devices"], found["device"], found["environment"]
    decoding, disk = found["decoding"], found["disk"]
    memory = f"{devices['memory_bytes'] / 2**30:,.1f} GiB each"
    links = [
        (f"links, {name}", f"{link['bytes_per_s'] / 1e9:,.2f} GB/s, {link['latency_s'] * 1e6:,.0f} us to a neighbour")
        for name, link in found["links"].items()
    ]
    return [
        ("machine", f"{machine['processor']}, cores: {machine['cores']}, {machine['memory_bytes'] / 2**30:,.1f} GiB"),
        (
            "devices",
            f"{devices['count']} x {devices['kind']} as {devices['shape']}, {memory}, hosts: {devices['hosts']}",
        ),
        (
            "one device",
            f"{device['matrix_flops_per_s'] / 1e12:,.2f} TFLOP/s of products, "
            f"{device['copy_bytes_per_s'] / 1e9:,.1f} GB/s of memory, "
            f"{device['feed_bytes_per_s'] / 1e9:,.1f} GB/s from the host",
        ),
        *(links or [("links", "none: there is one device")]),
        (
            "decoding",
            f"{decoding['one_core']:,.0f} photos/s by one core, {decoding['all_cores']:,.0f} by all "
            f"{decoding['cores']} ({decoding['decoder']})",
        ),
        (
            "disk",
            f"{disk['read_bytes_per_s'] / 1e6:,.0f} MB/s read, {disk['write_bytes_per_s'] / 1e6:,.0f} MB/s written",
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        *[("look at" if i == 0 else "", problem) for i, problem in enumerate(found["problems"])],
        (
            "ResNet-50",
            "images/s that each part could do alone: "
            + ", ".join(f"{name} {rate:,.0f}" for name, rate in found["images_per_s"].items()),
        ),
        ("time", f"{found['seconds']:.0f} s"),
    ]
