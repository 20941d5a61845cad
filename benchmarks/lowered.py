"""Print a digest of every lowered training, evaluation and prediction program, for CPU, GPU and TPU.

    python benchmarks/lowered.py > before.txt     # in one checkout
    python benchmarks/lowered.py > after.txt      # in another
    diff before.txt after.txt

A refactoring changes no digest. Nothing is compiled, no accelerator is needed, and no data are read except the digits
(by the `production` cases). TPU pods are described by libtpu (`pip install libtpu`); without it their programs are left
out. GPU programs are lowered for stand-in devices. Takes about four minutes on one core.

A line is: program, case, platform, strict digest, loose digest (see `stablehlo.py`).
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from stablehlo import KERNELS, digest, normalize

from podscale import pod as pods
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.forecast import choice
from podscale.models import registry
from podscale.models.functional import make_functional
from podscale.planner import described_devices
from podscale.training import compilation, setup
from podscale.training import step as steps

PLATFORMS = ("cpu", "cuda", "tpu")
KINDS = {"cpu": "cpu", "cuda": "h200", "tpu": "v3"}
BOTH, TRAIN, EVAL = ("train", "eval"), ("train",), ("eval",)

# --- how Podscale makes its programs ---------------------------------------------------------------------------------


def load_recipe(name: str, changes: dict[str, Any]) -> Any:
    return recipes.override_recipe(recipes.load_recipe(name), changes)


def name_pod(text: str, **fields: Any) -> Any:
    """The pod "KIND:ROWSxCOLUMNS" without devices; `fields` (hosts, cores) replace its own."""
    return replace(pods.named_pod(text), **fields)


def with_devices(pod: Any, devices: Any) -> Any:
    return replace(pod, devices=tuple(devices))


def describe_tpu_devices(text: str) -> Any:
    """The devices of a TPU pod that is not here, in the order in which the program numbers them."""
    return described_devices.describe_pod(pods.named_pod(text)).devices


def make_plan(recipe: Any, pod: Any, options: dict[str, Any]) -> Any:
    """The plan that training makes: from counts in the recipe, with the summation chosen where it is left open.

    The choice is made for the pod without devices: with some it would time messages between hosts.
    """
    size, classes = recipe.data.image_size, recipe.data.classes
    net, params, _ = make_functional(
        nnx.eval_shape(lambda: registry.build_model(recipe.model, classes, size)), recipe.model.freeze
    )
    parameters = sum(leaf.size for leaf in jax.tree.leaves(net.split(params)[0]))
    chosen = choice.choose_summation(Options(**options), with_devices(pod, ()), parameters).options
    return setup.plan_recipe(recipe, pod, chosen)


def put_plan_on(plan: Any, devices: Any) -> Any:
    return replace(plan, pod=with_devices(plan.pod, devices))


def programs_of(plan: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """{"train", "eval", "predict"}: jitted functions and shapes of their arguments, as training would call them."""
    program = setup.describe_program(plan)
    recipe, mesh, net, state = plan.recipe, program.mesh, program.net, program.describe_state()
    size = recipe.data.image_size
    train = compilation.make_train_call(program), (state, *steps.describe_call_arguments(plan, mesh))

    count, spread = plan.eval_images * plan.pod.size, pods.make_batch_sharding(mesh)
    images = jax.ShapeDtypeStruct((count, size, size, 3), np.uint8, sharding=spread)
    labels = jax.ShapeDtypeStruct((count,), np.int32, sharding=spread)
    tally = _everywhere(jax.eval_shape(steps.zero_counts), mesh)
    numbers = state.params, state.stats
    evaluate = steps.make_eval_call(net, plan, mesh), (*numbers, images, labels, tally)

    bare = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (*numbers, images))
    predict = steps.make_predictor(net, recipe), bare
    return {"train": train, "eval": evaluate, "predict": predict}


def run_production_path(recipe: Any, shape: str, options: dict[str, Any]) -> None:
    """Prepare a job on virtual CPU devices and compile its programs, by the code that `podscale train` runs."""
    rows, cols = pods.parse_shape(shape)
    pod = pods.make_pod(jax.devices("cpu")[: rows * cols], shape)
    ready = setup.prepare(recipe, pod, Options(**options))
    compilation.compile_train_step(ready)
    compilation.compile_eval_step(ready)


def _everywhere(tree: Any, mesh: Any) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


# --- cases -----------------------------------------------------------------------------------------------------------

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


# --- lowering --------------------------------------------------------------------------------------------------------

Lowered = tuple[str, str, str, Any]  # program, case, platform, jax.stages.Lowered


def lower_case(case: Case, is_selected: Any) -> Iterator[Lowered]:
    """Lower the programs of a case for those platforms whose lines are is_selected."""
    counts = dict(zip(("train_samples", "val_samples", "classes"), COUNTS.get(case.recipe, ()), strict=False))
    recipe = load_recipe(case.recipe, {f"data.{key}": value for key, value in counts.items()} | case.changes)
    lines = [(program, platform) for platform in case.platforms for program in case.programs]
    lines = [line for line in lines if is_selected(line[0], case.name, line[1])]
    traced: dict[tuple[str, str], Any] = {}
    programs: dict[str, Any] = {}
    for program, platform in lines:
        kind = "cpu" if case.one_plan else platform
        if kind not in programs:
            programs[kind] = programs_of(plan_case(case, recipe, kind))
        if (kind, program) not in traced:
            call, arguments = programs[kind][program]
            traced[kind, program] = call.trace(*arguments)
        yield program, case.name, platform, traced[kind, program].lower(lowering_platforms=(platform,))


def plan_case(case: Case, recipe: Any, platform: str) -> Any:
    """The plan for the platform's pod, with devices that a program can be lowered for.

    Of a GPU, plans are made for stand-ins that say what a Hopper GPU says of itself; programs are then lowered for as
    many CPU devices. One TPU chip is the first of a described board of four.
    """
    text = case.pod if ":" in case.pod else f"{KINDS[platform]}:{case.pod}"
    if platform == "tpu":
        if text.endswith(":1x1"):
            text, board = "v5e:1x1", "v5e:2x2"
        else:
            board = text
        pod = name_pod(text, **case.pod_fields)
        devices = describe_tpu_devices(board)[: pod.size]
        return make_plan(recipe, with_devices(pod, devices), case.options)
    pod = name_pod(text, **case.pod_fields)
    devices = jax.devices("cpu")[: pod.size]
    if platform == "cpu":
        return make_plan(recipe, with_devices(pod, devices), case.options)
    hopper = SimpleNamespace(platform="gpu", compute_capability="9.0", process_index=0, id=0, device_kind="NVIDIA H200")
    return put_plan_on(make_plan(recipe, with_devices(pod, [hopper] * pod.size), case.options), devices)


PRODUCTION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "1x1": ("1x1", {}, {}),
    "2x2": ("2x2", {"optimizer.average": 0.99}, {"summation": "torus"}),
    "sharded": ("2x2", {}, {"summation": "sharded", "micro_batches": 2, "steps_per_call": 2}),
    "device-cache": ("2x2", {}, {"cache": "device"}),
}


def lower_production(is_selected: Any) -> Iterator[Lowered]:
    """The programs that the code of `podscale train` hands to the compiler, on virtual CPU devices."""
    for name, (shape, changes, options) in PRODUCTION.items():
        case = f"production-{name}"
        if not any(is_selected(program, case, "cpu") for program in BOTH):
            continue
        for program, lowered in zip(BOTH, capture_compilations(shape, changes, options), strict=True):
            if is_selected(program, case, "cpu"):
                yield program, case, "cpu", lowered


def capture_compilations(shape: str, changes: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """What is compiled with `Lowered.compile`, which gives a program that does nothing meanwhile."""
    captured = []

    def compile_nothing(self: Any, *args: Any, **kwargs: Any) -> Any:
        captured.append(self)
        return lambda *args: None

    compile_really = jax.stages.Lowered.compile
    jax.stages.Lowered.compile = compile_nothing  # type: ignore[method-assign]
    try:
        run_production_path(load_recipe("digits", changes), shape, options)
    finally:
        jax.stages.Lowered.compile = compile_really  # type: ignore[method-assign]
    return captured


# --- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression that a line's first three words must match")
    parser.add_argument("--dump", type=Path, help="folder for the normalized texts")
    parser.add_argument("--list", action="store_true", help="list the cases, and lower nothing")
    parser.add_argument("--times", action="store_true", help="seconds of every line on stderr")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 16)
    has_libtpu = util.find_spec("libtpu") is not None

    def is_selected(program: str, case: str, platform: str) -> bool:
        return bool(re.search(arguments.only, f"{program} {case} {platform}")) and (platform != "tpu" or has_libtpu)

    if arguments.list:
        lines = [
            (p, case.name, platform) for case in list_cases() for platform in case.platforms for p in case.programs
        ]
        lines += [(p, f"production-{name}", "cpu") for name in PRODUCTION for p in BOTH]
        print(*(" ".join(line) for line in lines if is_selected(*line)), sep="\n")
        return
    began, count = time.perf_counter(), 0
    last = began
    for program, case, platform, lowered in lower_all(is_selected):
        strict, loose = normalize(lowered)
        print(f"{program:7} {case:36} {platform:4} {digest(strict)} {loose[:16]}", flush=True)
        if arguments.dump:
            dump(arguments.dump, f"{program}.{case}.{platform}", strict)
        now = time.perf_counter()
        if arguments.times:
            print(f"{now - last:6.2f} s {len(strict):10} {program} {case} {platform}", file=sys.stderr, flush=True)
        last, count = now, count + 1
    print(f"{count} programs in {time.perf_counter() - began:.0f} s, jax {jax.__version__}", file=sys.stderr)


def lower_all(is_selected: Any) -> Iterator[Lowered]:
    for case in list_cases():
        yield from lower_case(case, is_selected)
    yield from lower_production(is_selected)


def dump(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.mlir").write_text(text)
    for key, kernel in KERNELS.items():
        (folder / f"kernel.{key[:16]}.mlir").write_text(kernel)


if __name__ == "__main__":
    main()
