"""Measuring the training step and the evaluation step, on made-up data that is already on the devices."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from podscale import recipe as recipes
from podscale.bench.doctor import rates
from podscale.bench.profile import budget, trace
from podscale.bench.profile.program import Program
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.plan import Counts
from podscale.pod import Pod, batch_sharding
from podscale.processes.group import broadcast_int
from podscale.recipe import Recipe
from podscale.training.compilation import compile_eval_step, compile_train_step
from podscale.training.setup import Job, assemble

SECONDS_PER_REPEAT = 1.0
PROFILED_CALLS = 3
NAMED = {"xla_gpu_enable_command_buffer": ""}  # or the profiler has one name for all kernels of a CUDA graph


def measure_step(
    recipe: Recipe, pod: Pod, options: Options, images: int = 0, repeats: int = 5, profile: bool = False
) -> dict[str, Any]:
    """Milliseconds per update and images per second: the median of `repeats` stretches of about a second each.

    `images` per device replaces the recipe's batch; a batch-norm group then never spans more than the whole batch. With
    `profile`, also where the time of an update goes on the device, by kind of work.
    """
    began = time.perf_counter()
    job = _job(recipe, pod, options, images, repeats)
    call, state, batch = compile_train_step(job), job.state, _made_up(job)

    def update() -> Any:
        nonlocal state
        state, _ = call(state, *batch)
        return state

    found = _timed(update, job.plan.steps_per_call, job, repeats, began)
    return found | ({"budget": _budget(state, batch, job)} if profile else {})


def measure_evaluation(recipe: Recipe, pod: Pod, options: Options, images: int = 0, repeats: int = 5) -> dict[str, Any]:
    """The same of the evaluation step."""
    began = time.perf_counter()
    job = _job(recipe, pod, options, images, repeats)
    plan = replace(job.plan, eval_images=job.recipe.batch.size // pod.size)
    job = job._replace(plan=plan)
    call, (params, stats, *pictures, tally) = compile_eval_step(job)
    batch = [_drawn(array, 256 if array.dtype == np.uint8 else plan.counts.classes) for array in pictures]

    def count() -> Any:
        nonlocal tally
        tally, _ = call(params, stats, *batch, tally)
        return tally

    return _timed(count, 1, job, repeats, began)


def _job(recipe: Recipe, pod: Pod, options: Options, images: int, repeats: int) -> Job:
    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, not {repeats}")
    if images:
        size = images * pod.size
        span = recipe.batch.span if size % recipe.batch.span == 0 else size
        recipe = recipes.override(recipe, {"batch.size": size, "batch.span": span, "data.lanes": 1})
    return assemble(recipe, pod, _counts(recipe), options)


def _timed(work: Callable[[], Any], steps: int, job: Job, repeats: int, began: float) -> dict[str, Any]:
    """How long each of the `steps` takes that a call of `work` does; compiling began when it says."""
    jax.block_until_ready(work())
    compile_s = time.perf_counter() - began
    times: list[float] = []
    calls = 1
    while len(times) < repeats:
        start = time.perf_counter()
        for _ in range(calls):
            result = work()
        jax.block_until_ready(result)
        spent = time.perf_counter() - start
        if calls == 1:  # the first one only tells how many make a second; all processes must do as many
            calls = max(2, broadcast_int(round(SECONDS_PER_REPEAT / spent)))
        else:
            times.append(spent / (calls * steps))
    median, pod, size = statistics.median(times), job.plan.pod, job.recipe.batch.size
    return {
        "recipe": job.recipe.name,
        "devices": f"{pod.size} x {pod.kind}",
        "images_per_device": size // pod.size,
        "step_ms": median * 1e3,
        "step_ms_all": [t * 1e3 for t in times],
        "images_per_s": size / median,
        "compile_s": compile_s,
        "peak_bytes": _peak_bytes(pod),
    }


def _budget(state: Any, batch: tuple[Any, ...], job: Job) -> dict[str, Any]:
    """Where the time of an update goes, beside what this machine can do at most, which is measured first."""
    best = rates.device(job.plan.pod)
    device = next(d for d in job.plan.pod.devices if d.process_index == jax.process_index())
    call = compile_train_step(job, options=NAMED if device.platform == "gpu" else None)
    state, _ = call(state, *batch)
    jax.block_until_ready(state)

    def work() -> Any:
        nonlocal state
        for _ in range(PROFILED_CALLS):
            state, _ = call(state, *batch)
        return state

    seen = trace.watch(work, device)
    ceilings = budget.Ceilings(best["copy_bytes_per_s"], best["matrix_flops_per_s"])
    found = budget.of(Program(call.as_text()), seen, PROFILED_CALLS * job.plan.steps_per_call, ceilings)
    return found | {"copy_bytes_per_s": ceilings.bytes_per_s, "matrix_flops_per_s": ceilings.flops_per_s}


def _counts(recipe: Recipe) -> Counts:
    """The recipe's own, or ImageNet's."""
    data = recipe.data
    return Counts(data.train_samples or 1_281_167, data.val_samples or 50_000, data.classes or 1000)


def _made_up(job: Job) -> tuple[Any, ...]:
    """A call's worth of random pictures on the devices, and the number of updates in it."""
    size, shape, sharding = job.recipe.data.image_size, job.plan.batch_shape, batch_sharding(job.mesh, axis=2)
    images = jax.ShapeDtypeStruct((*shape, size, size, 3), np.uint8, sharding=sharding)
    labels = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
    return _drawn(images, 256), _drawn(labels, job.plan.counts.classes), np.int32(job.plan.steps_per_call)


def _drawn(like: jax.ShapeDtypeStruct, below: int) -> jax.Array:
    numbers = np.random.default_rng(0).integers(0, below, like.shape, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, numbers.__getitem__)


def _peak_bytes(pod: Pod) -> int:
    own = next(d for d in pod.devices if d.process_index == jax.process_index())
    stats = own.memory_stats()
    return int(stats.get("peak_bytes_in_use", 0)) if stats else 0
