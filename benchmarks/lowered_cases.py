"""The cases of `lowered.py`: recipes with changes, pods and options whose programs are compared."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PLATFORMS = ("cpu", "cuda", "tpu")
BOTH, TRAIN, EVAL = ("train", "eval"), ("train",), ("eval",)

COUNTS = {
    "digits": (1437, 360, 10),
    "cifar10": (50000, 10000, 10),
    "cifar10-fast": (50000, 10000, 10),
    "imagefolder": (9025, 3929, 10),
    "finetune": (100, 500, 5),
}


@dataclass(frozen=True)
class Case:
    """A recipe with changes, a pod and options; one plan for each platform, or a plan on CPUs lowered for all."""

    name: str
    recipe: str = "digits"
    changes: dict[str, Any] = field(default_factory=dict)
    pod: str = "2x2"  # a shape, or KIND:SHAPE for one platform alone
    options: dict[str, Any] = field(default_factory=dict)
    programs: tuple[str, ...] = BOTH
    one_plan: bool = False
    platforms: tuple[str, ...] = PLATFORMS
    pod_fields: dict[str, int] = field(default_factory=dict)


def list_cases() -> list[Case]:
    return [*structural_cases(), *variants(), *model_cases(), *large_cases()]


def structural_cases() -> Iterator[Case]:
    """How the program is laid out over a pod: on each platform by the plan of a pod of its own."""
    strategies = ("xla", "ring", "ring2", "torus", "torus4", "swing", "swing_latency", "sharded")
    yield Case("digits-1x1", pod="1x1", programs=(*BOTH, "predict"))
    yield Case("digits-auto")
    for name in strategies:
        yield Case(f"digits-{name}", options={"summation": name}, programs=TRAIN)
    for name in ("xla", "ring2", "torus", "sharded"):
        options = {"summation": name, "payload": "bfloat16"}
        yield Case(f"digits-{name}-bfloat16", options=options, programs=TRAIN)
    for name in ("ring", "torus4"):  # rows and columns of different lengths
        yield Case(f"digits-2x4-{name}", pod="2x4", options={"summation": name}, programs=TRAIN)
    for name in ("xla", "torus", "sharded"):
        options = {"summation": name, "bucket_mib": 1}
        yield Case(f"digits-buckets-{name}", changes={"model.width": 64}, options=options, programs=TRAIN)
    yield Case("digits-one-bucket", changes={"model.width": 64}, options={"bucket_mib": 0}, programs=TRAIN)
    yield Case("digits-micro-batches", options={"micro_batches": 2}, changes={"batch.span": 32})
    yield Case("digits-micro-batches-1x1", pod="1x1", options={"micro_batches": 2}, programs=TRAIN)
    for count in (1, 4):
        yield Case(f"digits-{count}-steps-a-call", options={"steps_per_call": count}, programs=TRAIN)
    yield Case("digits-device-cache-1x1", pod="1x1", options={"cache": "device"})
    yield Case("digits-device-cache", options={"cache": "device", "steps_per_call": 3, "summation": "sharded"})
    for span in (8, 128):
        yield Case(f"digits-span-{span}", changes={"batch.span": span})
    yield Case(
        "digits-two-hosts-of-two-cores",
        pod="cpu:2x2",
        platforms=("cpu",),
        changes={"batch.span": 128},
        pod_fields={"cores": 2, "hosts": 2},
    )
    yield Case("digits-v4-3d", pod="v4:2x2x2", platforms=("tpu",), options={"summation": "torus4"}, programs=TRAIN)
    yield Case("digits-deterministic", options={"deterministic": True})
    yield Case("digits-eval-images", options={"eval_images": 7}, programs=EVAL)


def variants() -> Iterator[Case]:
    """What a recipe chooses: a plan on CPUs, lowered for every platform."""

    def variant(name: str, changes: dict[str, Any], **fields: Any) -> Case:
        return Case(name, changes=changes, one_plan=True, **{"programs": TRAIN} | fields)

    rules: dict[str, dict[str, Any]] = {
        "sgd": {"name": "sgd"},
        "sgd-nesterov": {"name": "sgd", "nesterov": True},
        "lars-mlperf": {"form": "mlperf", "epsilon": 1e-6},
        "lars-scaled": {"form": "scaled"},
        "lars-optax": {"form": "optax"},
        "adamw": {"name": "adamw"},
        "adamw-nesterov": {"name": "adamw", "nesterov": True, "epsilon": 1e-7},
        "muon": {"name": "muon"},
        "muon-renormalize": {"name": "muon", "renormalize": True, "nesterov": True, "rest_momentum": 0.8},
        "clip": {"name": "sgd", "clip_norm": 1.0},
        "average": {"average": 0.99},
        "skip": {"skip": ["bias"]},
    }
    for name, section in rules.items():
        changes = {f"optimizer.{key}": value for key, value in section.items()}
        yield variant(f"optimizer-{name}", changes)
        if "muon" not in name and "nesterov" not in name:
            yield variant(f"optimizer-{name}-sharded", changes, options={"summation": "sharded"})

    schedules: dict[str, dict[str, Any]] = {
        "cosine": {"decay": "cosine"},
        "step": {"decay": "step", "milestones": [5.0, 20.0]},
        "constant": {"decay": "constant", "warmup_epochs": 0.0},
        "linear": {"power": 1.0, "end": 0.0, "scale_batch": 64},
        "bias": {"bias_peak": 2.0},
        "head": {"head_peak": 0.1},
        "stem": {"stem_epochs": 4.0},
        "all-rates": {"bias_peak": 2.0, "head_peak": 0.1, "stem_epochs": 4.0},
    }
    for name, section in schedules.items():
        yield variant(f"schedule-{name}", {f"schedule.{key}": value for key, value in section.items()})
    rates = {f"schedule.{key}": value for key, value in schedules["all-rates"].items()}
    yield variant("schedule-all-rates-muon", rates | {"optimizer.name": "muon"})
    yield variant("schedule-all-rates-sharded", rates, options={"summation": "sharded"})

    augments: dict[str, dict[str, Any]] = {
        "mixup": {"mixup": 0.2},
        "erase": {"erase": 0.25},
        "mixup-and-erase": {"mixup": 0.2, "erase": 0.25},
        "no-smoothing": {"label_smoothing": 0.0},
        "randaugment": {"randaugment": 2, "crop": "resized"},
    }
    for name, section in augments.items():
        yield variant(f"augment-{name}", {f"augment.{key}": value for key, value in section.items()})
    mixing = {"augment.mixup": 0.2, "augment.erase": 0.25, "train.seed": 3}
    yield variant(
        "augment-bfloat16-micro-batches", mixing | {"model.precision": "bfloat16"}, options={"micro_batches": 2}
    )

    for views in (2, 6):
        yield variant(f"views-{views}", {"data.eval_views": views}, programs=("eval", "predict"))
    yield variant("stats-momentum", {"train.stats_momentum": 0.5})
    yield variant("fused", {}, options={"fused": "on"}, programs=BOTH)
    yield variant("frozen", {"model.freeze": ["layers.0", "layers.1.conv1"]}, programs=BOTH)
    yield variant("frozen-sharded", {"model.freeze": ["layers.0"]}, options={"summation": "sharded"})
    yield variant("frozen-fused", {"model.freeze": ["layers.0", "layers.1"]}, options={"fused": "on"})
    yield variant("frozen-body-adamw", {"model.freeze": ["body"], "optimizer.name": "adamw"})


SMALL = {"data.image_size": 64, "batch.size": 64, "batch.span": 32, "data.lanes": 1}


def model_cases() -> Iterator[Case]:
    """The networks and the other recipes."""
    yield Case("cifar10-fast", "cifar10-fast", pod="1x1", options={"cache": "device"})
    yield Case("cifar10-fast-2x2", "cifar10-fast", programs=TRAIN, one_plan=True)
    yield Case("cifar10", "cifar10", pod="1x1", options={"cache": "device"}, one_plan=True)
    yield Case("resnet18-conv7", changes=SMALL | {"model.name": "resnet18", "model.stem": "conv7"}, one_plan=True)
    yield Case("imagefolder", "imagefolder", pod="1x1", one_plan=True, programs=(*BOTH, "predict"))
    yield Case("finetune", "finetune", pod="1x1", changes={"model.freeze": ["body"]})
    fused = SMALL | {"model.width": 64, "data.image_size": 64}
    yield Case("resnet50-fused", "finetune", fused, options={"fused": "on"}, one_plan=True)


def large_cases() -> Iterator[Case]:
    """Pods that are not here, by the published recipes, and the Hopper kernels."""
    four, big = "resnet50-imagenet-4k", "resnet50-imagenet-32k"
    yield Case("4k-h200", four, pod="h200:1x8", platforms=("cuda",), options={"fused": "off"})
    yield Case("4k-h200-auto", four, pod="h200:1x8", platforms=("cuda",), programs=TRAIN)
    yield Case("4k-h200-fused", four, pod="h200:1x8", platforms=("cuda",), options={"fused": "on"}, programs=EVAL)
    yield Case(
        "hopper-frozen",
        "finetune",
        pod="h200:1x1",
        platforms=("cuda",),
        changes={"model.freeze": ["layers.0", "layers.1", "layers.2", "layers.3"]},
        options={"fused": "on"},
        programs=TRAIN,
    )
    yield Case("32k-v3", big, pod="v3:32x32", platforms=("tpu",))
    yield Case("32k-v3-bfloat16", big, pod="v3:32x32", platforms=("tpu",), options={"payload": "bfloat16"})
    reduced = {"model.name": "resnet8", "model.stem": "small", "data.image_size": 32}
    for name in ("torus4", "sharded"):
        yield Case(f"32k-v3-{name}", big, reduced, "v3:32x32", {"summation": name}, TRAIN, platforms=("tpu",))
    tiled = reduced | {"batch.size": 512, "batch.span": 256, "data.lanes": 8}
    yield Case("32k-v3-tiles", big, tiled, "v3:4x4", {"steps_per_call": 1}, platforms=("tpu",))
    yield Case("32k-h200-nodes", big, tiled, "h200:2x8", platforms=("cuda",))
