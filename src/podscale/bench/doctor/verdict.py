"""Find what limits a training of ResNet-50 on a machine of these rates, and what to do about it.

Each part alone could process so many images per second; the smallest number is the bottleneck. The devices' number is
the forecast's, from measured steps, where the chip is known: no step reaches its peak rates. Elsewhere it is the
roofline of the model's work, arithmetic and memory bandwidth, and called so.
"""

from types import MappingProxyType

from podscale.config.json_types import JsonObject
from podscale.forecast.bucket import IMAGE_BYTES
from podscale.forecast.chips import find_chip
from podscale.forecast.compute import RESNET50, predict_step_s

IMAGES = 256  # per device and step: the gradients are summed once for all of them
FORECAST = "a forecast of its step without fused kernels, which are faster on GPUs"
ROOFLINE = "a roofline of measured peaks, which a training does not reach"
ADVICE = MappingProxyType(
    {
        "devices": "use more or faster devices, a smaller model or smaller images (data.image_size)",
        "links": "give each device more images (batch.size), send bfloat16 (plan.payload), or use a faster network",
        "decoding": "run `podscale data prepare` on the data, keep it decoded in memory (plan.cache), or use more "
        "cores",
        "disk": "keep the data on a faster disk, or in memory (plan.cache)",
        "bucket": "let the disk cache hold the data after the first epoch, run `podscale data prepare` on it, use more "
        "hosts, or put the bucket into the region of the machines",
        "feeding": "check whether other programs saturate the bus and whether memory can be pinned",
    }
)


def compute_limits(result: JsonObject) -> dict[str, float]:
    """Return the images per second that each part could process alone."""
    device, devices = result["device"], result["devices"]["count"]
    compute = _compute_device_rate(result)
    shared = result["devices"]["platform"] == "cpu"  # simulated devices share the cores that were measured
    limits = {
        "devices": compute * (1 if shared else devices),
        "decoding": result["decoding"]["all_cores"],
        "disk": result["disk"]["read_bytes_per_s"] / IMAGE_BYTES,
        "feeding": device["feed_bytes_per_s"] / (224 * 224 * 3),
    }
    if "bucket" in result:
        limits["bucket"] = result["bucket"]["bytes_per_s"] / IMAGE_BYTES
    slowest = min((link["bytes_per_s"] for link in result["links"].values()), default=0.0)
    if slowest:
        limits["links"] = IMAGES * devices * slowest / (2 * 4 * RESNET50.parameters)
    return limits


def _compute_device_rate(result: JsonObject) -> float:
    """Return the images per second of one device: the forecast's, but no more than its measured rates allow."""
    device, row = result["device"], find_chip(result["devices"]["kind"])
    roofline = min(device["matrix_flops_per_s"] / RESNET50.flops, device["copy_bytes_per_s"] / RESNET50.bytes)
    return min(roofline, IMAGES / predict_step_s(row, RESNET50, IMAGES)) if row else roofline


def describe_device_rate(result: JsonObject) -> str:
    """Return what the devices' images per second are: a forecast or a roofline."""
    return FORECAST if find_chip(result["devices"]["kind"]) else ROOFLINE


def find_bottleneck(limits: dict[str, float]) -> str:
    """Return the part with the lowest limit.

    >>> find_bottleneck({"devices": 7000.0, "decoding": 900.0, "disk": 5000.0})
    'decoding'
    """
    return min(limits, key=lambda part: limits[part])


def format_verdict(limits: dict[str, float], problems: list[str], device_rate: str = "") -> str:
    """Return the bottleneck and what to do about it in one sentence; an unused accelerator comes before any rate.

    Args:
        limits: images per second by part.
        problems: of this machine.
        device_rate: what the devices' number is.
    """
    idle = next((problem for problem in problems if "but JAX computes on the CPU" in problem), "")
    if idle:
        return f"The bottleneck here: {idle}."
    first, second = sorted(limits, key=lambda part: limits[part])[:2]
    name = f"the {first}" if first in ("devices", "links", "disk", "bucket") else first
    rates = f"{limits[first]:,.0f} images/s of ResNet-50 at best, where {second} would allow {limits[second]:,.0f}"
    if device_rate and "devices" in (first, second):
        rates += f" (the devices' rate is {device_rate})"
    return f"The bottleneck here is {name}: {rates}; {ADVICE[first]}."
