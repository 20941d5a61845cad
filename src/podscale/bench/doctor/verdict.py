"""Find what limits a training of ResNet-50 on a machine of these rates, and what to do about it.

Each part alone could process so many images per second; the smallest number is the bottleneck. The devices' number is
the roofline of the model's work: arithmetic and memory bandwidth.
"""

from types import MappingProxyType

from podscale.config.json_types import JsonObject
from podscale.forecast.bucket import IMAGE_BYTES
from podscale.forecast.compute import RESNET50

IMAGES = 256  # per device and step: the gradients are summed once for all of them
ADVICE = MappingProxyType(
    {
        "devices": "use more or faster devices, a smaller model or smaller images (data.image_size)",
        "links": "give each device more images (batch.size), send bfloat16 (plan.payload), or use a faster network",
        "decoding": "run `podscale data prepare` on the data, keep it decoded in memory (plan.cache), or use more "
        "cores",
        "disk": "keep the data on a faster disk, or in memory (plan.cache)",
        "bucket": "let the disk cache hold the data after the first epoch, run `podscale data prepare` on it, use more "
        "hosts, or put the bucket into the region of the machines",
        "feeding": "see whether other programs use the bus, or whether memory cannot be pinned",
    }
)


def compute_limits(result: JsonObject) -> dict[str, float]:
    """Return the images per second that each part could process alone."""
    device, devices = result["device"], result["devices"]["count"]
    compute = min(device["matrix_flops_per_s"] / RESNET50.flops, device["copy_bytes_per_s"] / RESNET50.bytes)
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


def find_bottleneck(limits: dict[str, float]) -> str:
    """Return the part with the lowest limit.

    >>> find_bottleneck({"devices": 7000.0, "decoding": 900.0, "disk": 5000.0})
    'decoding'
    """
    return min(limits, key=lambda part: limits[part])


def format_verdict(limits: dict[str, float], problems: list[str]) -> str:
    """Return the bottleneck and what to do about it in one sentence; an unused accelerator comes before any rate."""
    idle = next((problem for problem in problems if "but JAX computes on the CPU" in problem), "")
    if idle:
        return f"What holds a run back here: {idle}."
    first, second = sorted(limits, key=lambda part: limits[part])[:2]
    verb = "are" if first in ("devices", "links") else "is"
    name = f"the {first}" if first in ("devices", "links", "disk", "bucket") else first
    rates = f"{limits[first]:,.0f} images/s of ResNet-50 at best, where {second} would allow {limits[second]:,.0f}"
    return f"What holds a run back here {verb} {name}: {rates}; {ADVICE[first]}."
