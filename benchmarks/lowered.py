"""Print a digest of every lowered training, evaluation and prediction program, for CPU, GPU and TPU.

    python benchmarks/lowered.py > before.txt     # in one checkout
    python benchmarks/lowered.py > after.txt      # in another
    diff before.txt after.txt

A refactoring changes no digest. Nothing is compiled, no accelerator is needed, and no data are read except the digits
(by the `production` cases). TPU pods are described by libtpu (`pip install libtpu`); without it their programs are left
out. GPU programs are lowered for stand-in devices. Takes about four minutes on one core.

Since 23de838 learning rates, seed and times are arguments of every training program; with `--constants` they are
constants in it, as before. The `production` cases, which the code of `podscale train` makes, are then left out.

A line is: program, case, platform, strict digest, loose digest (see `stablehlo.py`).
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from lowered_cases import BOTH, COUNTS, Case, list_cases
from stablehlo import KERNELS, digest, normalize

from podscale import pod as pods
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.forecast import choice
from podscale.models import registry
from podscale.models.functional import make_functional
from podscale.planner import topologies
from podscale.training import compilation, setup, update_rule
from podscale.training import step as steps

KINDS = {"cpu": "cpu", "cuda": "h200", "tpu": "v3"}

# --- how Podscale makes its programs ---------------------------------------------------------------------------------


def load_recipe(name: str, changes: dict[str, Any]) -> Any:
    return recipes.override_recipe(recipes.load_recipe(name), changes)


def name_pod(text: str, **fields: Any) -> Any:
    """The pod "KIND:ROWSxCOLUMNS" without devices; `fields` (hosts, cores) replace its own."""
    return replace(pods.parse_pod(text), **fields)


def with_devices(pod: Any, devices: Any) -> Any:
    return replace(pod, devices=tuple(devices))


def describe_tpu_devices(text: str) -> Any:
    """The devices of a TPU pod that is not here, in the order in which the program numbers them."""
    return topologies.describe_pod(pods.parse_pod(text)).devices


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


def programs_of(plan: Any, has_constants: bool) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """{"train", "eval", "predict"}: jitted functions and shapes of their arguments, as training would call them.

    With `has_constants`, the numbers of the recipe are constants of the training program instead of arguments.
    """
    program = setup.describe_program(plan)
    recipe, mesh, net, state = plan.recipe, program.mesh, program.net, program.describe_state()
    size = recipe.data.image_size
    batch, scalars = steps.describe_call_arguments(plan, mesh), update_rule.describe_scalars(plan, mesh)
    train = compilation.make_train_call(program), (state, *batch, scalars)
    if has_constants:
        call = steps.make_train_call(net, plan, program.optimizer, program.schedule, mesh)
        train = call, (state, *batch)

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


# --- lowering --------------------------------------------------------------------------------------------------------

Lowered = tuple[str, str, str, Any]  # program, case, platform, jax.stages.Lowered


def lower_case(case: Case, is_selected: Any, has_constants: bool) -> Iterator[Lowered]:
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
            programs[kind] = programs_of(plan_case(case, recipe, kind), has_constants)
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
    parser.add_argument("--constants", action="store_true", help="the recipe's numbers are constants of the programs")
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
    for program, case, platform, lowered in lower_all(is_selected, arguments.constants):
        strict, loose = normalize(lowered)
        print(f"{program:7} {case:36} {platform:4} {digest(strict)} {loose[:16]}", flush=True)
        if arguments.dump:
            dump(arguments.dump, f"{program}.{case}.{platform}", strict)
        now = time.perf_counter()
        if arguments.times:
            print(f"{now - last:6.2f} s {len(strict):10} {program} {case} {platform}", file=sys.stderr, flush=True)
        last, count = now, count + 1
    print(f"{count} programs in {time.perf_counter() - began:.0f} s, jax {jax.__version__}", file=sys.stderr)


def lower_all(is_selected: Any, has_constants: bool) -> Iterator[Lowered]:
    for case in list_cases():
        yield from lower_case(case, is_selected, has_constants)
    if not has_constants:
        yield from lower_production(is_selected)


def dump(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.mlir").write_text(text)
    for key, kernel in KERNELS.items():
        (folder / f"kernel.{key[:16]}.mlir").write_text(kernel)


if __name__ == "__main__":
    main()
