"""Measure the training step and the evaluation step on random data that is already on the devices."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import jax
import numpy as np
from jaxtyping import PyTree

from podscale import recipe as recipes
from podscale.bench.doctor import rates
from podscale.bench.profile import budget, trace
from podscale.bench.profile.program import Program as DeviceProgram
from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.plan import Counts
from podscale.pod import Pod, make_batch_sharding
from podscale.processes.group import broadcast_int
from podscale.recipe import Recipe, find_largest_size
from podscale.training.compilation import compile_eval_step, compile_train_step
from podscale.training.program import Program
from podscale.training.setup import resolve

SECONDS_PER_REPEAT = 1.0
PROFILED_CALLS = 3
NAMED_KERNELS = MappingProxyType(
    {"xla_gpu_enable_command_buffer": ""}
)  # else the profiler has one name for all kernels of a CUDA graph


def measure_step(
    recipe: Recipe, pod: Pod, options: Options, images: int = 0, repeats: int = 5, profile: bool = False
) -> JsonObject:
    """Measure milliseconds per update and images per second.

    Args:
        recipe: its model, image size and optimizer are measured.
        pod: the devices.
        options: machine options.
        images: images per device; replaces the recipe's batch unless 0. A batch-norm group then spans at most the
            whole batch.
        repeats: timed intervals of about a second each, whose median counts.
        profile: whether to add where the time of an update goes on the device, by kind of work.
    """
    start = time.perf_counter()
    program = _make_program(recipe, pod, options, images, repeats)
    call, state, batch = compile_train_step(program), program.init_state(), _make_batch(program)

    def update() -> PyTree:
        nonlocal state
        state, _ = call(state, *batch)
        return state

    result = _measure_calls(update, program.plan.steps_per_call, program, repeats, start)
    return result | ({"budget": _measure_budget(state, batch, program)} if profile else {})


def measure_evaluation(recipe: Recipe, pod: Pod, options: Options, images: int = 0, repeats: int = 5) -> JsonObject:
    """Measure the evaluation step as `measure_step` measures the training step."""
    start = time.perf_counter()
    options = replace(options, eval_images=images or recipe.batch.size // pod.size)
    program = _make_program(recipe, pod, options, images, repeats)
    compilation, (_, _, *arrays, counts) = compile_eval_step(program)
    call = compilation.get()
    state = program.init_state()
    batch = [
        _make_random_array(array, 256 if array.dtype == np.uint8 else program.plan.counts.classes) for array in arrays
    ]

    def evaluate() -> PyTree:
        nonlocal counts
        counts, _ = call(state.params, state.stats, *batch, counts)
        return counts

    return _measure_calls(evaluate, 1, program, repeats, start)


def _make_program(recipe: Recipe, pod: Pod, options: Options, images: int, repeats: int) -> Program:
    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, not {repeats}")
    if images:
        size = images * pod.size
        span = recipe.batch.span if size % recipe.batch.span == 0 else size
        recipe = recipes.override_recipe(recipe, {"batch.size": size, "batch.span": span, "data.lanes": 1})
    options = replace(options, cache="none")  # random images are on the devices anyway
    return resolve(recipe, pod, _get_counts(recipe), options)


def _measure_calls(work: Callable[[], PyTree], steps: int, program: Program, repeats: int, start: float) -> JsonObject:
    """Time calls of `work`, each of so many `steps`; `start` is when compiling started."""
    jax.block_until_ready(work())
    compile_s = time.perf_counter() - start
    times: list[float] = []
    calls = 1
    while len(times) < repeats:
        start = time.perf_counter()
        for _ in range(calls):
            result = work()
        jax.block_until_ready(result)
        spent = time.perf_counter() - start
        if calls == 1:  # the first only shows how many calls take a second; all processes must make as many
            calls = max(2, broadcast_int(round(SECONDS_PER_REPEAT / spent)))
        else:
            times.append(spent / (calls * steps))
    median, pod, size = statistics.median(times), program.plan.pod, program.plan.recipe.batch.size
    return {
        "recipe": program.plan.recipe.name,
        "devices": f"{pod.size} x {pod.kind}",
        "images_per_device": size // pod.size,
        "step_ms": median * 1e3,
        "step_ms_all": [t * 1e3 for t in times],
        "images_per_s": size / median,
        "compile_s": compile_s,
        "peak_bytes": _get_peak_bytes(pod),
    }


def _measure_budget(state: PyTree, batch: tuple[PyTree, ...], program: Program) -> JsonObject:
    """Measure where the time of an update goes; the machine's ceilings are measured first."""
    ceiling_rates = rates.measure_device(program.plan.pod)
    device = next(d for d in program.plan.pod.devices if d.process_index == jax.process_index())
    call = compile_train_step(program, options=dict(NAMED_KERNELS) if device.platform == "gpu" else None)
    state, _ = call(state, *batch)
    jax.block_until_ready(state)

    def work() -> PyTree:
        nonlocal state
        for _ in range(PROFILED_CALLS):
            state, _ = call(state, *batch)
        return state

    activity = trace.profile_device(work, device)
    ceilings = budget.Ceilings(ceiling_rates["copy_bytes_per_s"], ceiling_rates["matrix_flops_per_s"])
    result = budget.compute_budget(
        DeviceProgram(call.as_text()), activity, PROFILED_CALLS * program.plan.steps_per_call, ceilings
    )
    return result | {"copy_bytes_per_s": ceilings.bytes_per_s, "matrix_flops_per_s": ceilings.flops_per_s}


def _get_counts(recipe: Recipe) -> Counts:
    """Return the recipe's counts, or ImageNet's where it has none."""
    data = recipe.data
    return Counts(data.train_samples or 1_281_167, data.val_samples or 50_000, data.classes or 1000)


def _make_batch(program: Program) -> tuple[PyTree, ...]:
    """Return the arguments of one call: random images and labels on the devices, and the number of updates."""
    size, shape, sharding = (
        find_largest_size(program.plan.recipe),
        program.plan.batch_shape,
        make_batch_sharding(program.mesh, axis=2),
    )
    images = jax.ShapeDtypeStruct((*shape, size, size, 3), np.uint8, sharding=sharding)
    labels = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
    return (
        _make_random_array(images, 256),
        _make_random_array(labels, program.plan.counts.classes),
        np.int32(program.plan.steps_per_call),
    )


def _make_random_array(like: jax.ShapeDtypeStruct, below: int) -> jax.Array:
    numbers = np.random.default_rng(0).integers(0, below, like.shape, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, numbers.__getitem__)


def _get_peak_bytes(pod: Pod) -> int:
    device = next(d for d in pod.devices if d.process_index == jax.process_index())
    stats = device.memory_stats()
    return int(stats.get("peak_bytes_in_use", 0)) if stats else 0
