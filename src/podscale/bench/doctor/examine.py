"""Examine this machine part by part, and format the result."""

import time
from collections.abc import Callable
from pathlib import Path

import jax

from podscale.bench.doctor import bucket, compatibility, rates, verdict
from podscale.config.json_types import Json, JsonObject
from podscale.data import decode
from podscale.errors import UserError
from podscale.pod import Pod
from podscale.runs import environment
from podscale.runs.environment import list_library_versions
from podscale.storage.locations import parse_location


def examine_machine(pod: Pod, path: str | Path = "", report: Callable[[str], object] = lambda part: None) -> JsonObject:
    """Measure what this machine can do, and find its bottleneck.

    Args:
        pod: the devices to measure.
        path: where temporary files are written, to measure its disk; or a folder in a bucket, which is read, while the
            disk is that of the current folder.
        report: is called with the name of each part before it is measured.

    Raises:
        UserError: there is no such folder, or the bucket cannot be read.
    """
    location = parse_location(path, "--path")
    folder = Path(location.key if location.is_local else "")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; name one that data or runs will be in with --path")
    start = time.perf_counter()
    local_devices = [d for d in pod.devices if d.process_index == jax.process_index()]
    stats = local_devices[0].memory_stats() or {}
    result: JsonObject = {
        "devices": {
            "platform": local_devices[0].platform,
            "kind": local_devices[0].device_kind,
            "count": pod.size,
            "shape": pod.shape,
            "hosts": pod.hosts,
            "memory_bytes": pod.memory_bytes,
            "used_bytes": int(stats.get("bytes_in_use", 0)),
        }
    }
    parts: dict[str, Callable[[], Json]] = {
        "device": lambda: rates.measure_device(pod),
        "links": lambda: rates.measure_links(pod),
        "decoding": lambda: rates.measure_decoding(folder) | {"decoder": decode.select_decoder()},
        "disk": lambda: rates.measure_disk(folder),
        "problems": lambda: compatibility.find_problems(local_devices[0].platform, folder),
    }
    if not location.is_local:
        parts = {"bucket": lambda: bucket.measure_bucket(location), **parts}
    for name, measure in parts.items():
        report(name)
        result[name] = measure()
    limits = verdict.compute_limits(result)
    result["devices_rate"] = verdict.describe_device_rate(result)
    return result | {
        "environment": environment.describe_machine(local_devices),
        "versions": list_library_versions(),
        "images_per_s": limits,
        "bottleneck": verdict.find_bottleneck(limits),
        "verdict": verdict.format_verdict(limits, result["problems"], result["devices_rate"]),
        "seconds": time.perf_counter() - start,
    }


def format_rows(result: JsonObject) -> list[tuple[str, str]]:
    """Return the result as rows of a table: names and values."""
    devices, device, machine = result["devices"], result["device"], result["environment"]
    decoding, disk = result["decoding"], result["disk"]
    memory = f"{devices['memory_bytes'] / 2**30:,.1f} GiB each"
    links = [
        (f"links, {name}", f"{link['bytes_per_s'] / 1e9:,.2f} GB/s, {link['latency_s'] * 1e6:,.0f} us to a neighbour")
        for name, link in result["links"].items()
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
        *(bucket.format_rows(result["bucket"]) if "bucket" in result else []),
        ("versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items())),
        *[("look at" if i == 0 else "", problem) for i, problem in enumerate(result["problems"])],
        (
            "ResNet-50",
            "images/s that each part could do limits: "
            + ", ".join(f"{name} {rate:,.0f}" for name, rate in result["images_per_s"].items())
            + f"; devices: {result['devices_rate']}",
        ),
        ("time", f"{result['seconds']:.0f} s"),
    ]
