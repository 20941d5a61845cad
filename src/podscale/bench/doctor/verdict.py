"""What holds a training of ResNet-50 back on a machine of these rates, and what to do about it.

Each part could do so many images a second if it were alone; the smallest number is the bottleneck. The devices' is
the roofline of the model's work: what they can multiply, and what they can move.
"""

from typing import Any

from podscale.forecast.compute import RESNET50

IMAGES = 256  # that a device has at once: the gradients are summed once for all of them
PHOTO_BYTES = 110_000  # of an ImageNet photo
ADVICE = {
    "devices": "use more or faster devices, a smaller model or smaller pictures (data.image_size)",
    "links": "give each device more images (batch.size), send bfloat16 (plan.payload), or use a faster network",
    "decoding": "run `podscale data prepare` on the data, keep it decoded in memory (plan.cache), or use more cores",
    "disk": "keep the data on a faster disk, or in memory (plan.cache)",
    "feeding": "see whether other programs use the bus, or whether memory cannot be pinned",
}


def limits(found: dict[str, Any]) -> dict[str, float]:
    """Images a second that each part could do alone."""
    device, devices = found["device"], found["devices"]["count"]
    compute = min(device["matrix_flops_per_s"] / RESNET50.flops, device["copy_bytes_per_s"] / RESNET50.bytes)
    shared = found["devices"]["platform"] == "cpu"  # devices that are simulated share the cores that were measured
    limits = {
        "devices": compute * (1 if shared else devices),
        "decoding": found["decoding"]["all_cores"],
        "disk": found["disk"]["read_bytes_per_s"] / PHOTO_BYTES,
        "feeding": device["feed_bytes_per_s"] / (224 * 224 * 3),
    }
    slowest = min((link["bytes_per_s"] for link in found["links"].values()), default=0.0)
    if slowest:
        limits["links"] = IMAGES * devices * slowest / (2 * 4 * RESNET50.parameters)
    return limits


def bottleneck(alone: dict[str, float]) -> str:
    """The part that can do the fewest images.

    >>> bottleneck({"devices": 7000.0, "decoding": 900.0, "disk": 5000.0})
    'decoding'
    """
    return min(alone, key=lambda part: alone[part])


def sentence(alone: dict[str, float], problems: list[str]) -> str:
    """The bottleneck and what to do, in one sentence; a part that lies idle comes before any rate."""
    idle = next((problem for problem in problems if "but JAX computes on the CPU" in problem), "")
    if idle:
        return f"What holds a run back here: {idle}."
    first, second = sorted(alone, key=lambda part: alone[part])[:2]
    verb = "are" if first in ("devices", "links") else "is"
    name = f"the {first}" if first in ("devices", "links", "disk") else first
    rates = f"{alone[first]:,.0f} images/s of ResNet-50 at best, where {second} would allow {alone[second]:,.0f}"
    return f"What holds a run back here {verb} {name}: {rates}; {ADVICE[first]}."
