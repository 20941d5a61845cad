"""Measuring the training step itself, on made-up data that is already on the devices."""

import statistics
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from podscale import models, optim
from podscale import plan as plans
from podscale import recipe as recipes
from podscale import step as steps
from podscale.errors import UserError
from podscale.memory import footprint
from podscale.models.functional import functional
from podscale.options import Options
from podscale.plan import Counts
from podscale.pod import Pod, batch_sharding
from podscale.recipe import Recipe

SECONDS_PER_REPEAT = 1.0


def step(recipe: Recipe, pod: Pod, options: Options, images: int = 0, repeats: int = 5) -> dict[str, Any]:
    """Milliseconds per update and images per second: the median of `repeats` stretches of about a second each.

    `images` per device replaces the recipe's batch; a batch-norm group then never spans more than the whole batch.
    """
    if images:
        size = images * pod.size
        span = recipe.batch.span if size % recipe.batch.span == 0 else size
        recipe = recipes.override(recipe, {"batch.size": size, "batch.span": span, "data.lanes": 1})
    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, not {repeats}")
    began = time.perf_counter()
    call, state, batch = _compiled(recipe, pod, options)
    state, _ = call(state, *batch)
    jax.block_until_ready(state)
    compile_s = time.perf_counter() - began
    steps_per_call = int(batch[2])
    calls = 1
    times: list[float] = []
    while len(times) < repeats:
        start = time.perf_counter()
        for _ in range(calls):
            state, _ = call(state, *batch)
        jax.block_until_ready(state)
        spent = time.perf_counter() - start
        if calls == 1 and spent < SECONDS_PER_REPEAT / 2:
            calls = max(2, round(SECONDS_PER_REPEAT / spent))  # the first one only tells how many make a second
        else:
            times.append(spent / (calls * steps_per_call))
    median = statistics.median(times)
    return {
        "recipe": recipe.name,
        "devices": f"{pod.size} x {pod.kind}",
        "images_per_device": recipe.batch.size // pod.size,
        "step_ms": median * 1e3,
        "step_ms_all": [t * 1e3 for t in times],
        "images_per_s": recipe.batch.size / median,
        "compile_s": compile_s,
        "peak_bytes": _peak_bytes(pod),
    }


def _compiled(recipe: Recipe, pod: Pod, options: Options) -> Any:
    """The train call, its state, and a batch of random pictures on the devices."""
    classes = recipe.data.classes or 1000
    counts = Counts(recipe.data.train_samples or 1_281_167, recipe.data.val_samples or 50_000, classes)
    net, params, stats = functional(models.build(recipe.model, classes, recipe.data.image_size))
    optimizer = optim.optimizer(recipe, optim.schedule(recipe, 1000, 100.0))
    plan = plans.make(recipe, pod, counts, options, footprint(recipe, net, params, stats, optimizer))
    mesh = pod.mesh(plan.tile)
    state = steps.initial_state(recipe, params, stats, optimizer)
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    random, size = np.random.default_rng(0), recipe.data.image_size
    shape = (plan.steps_per_call, plan.micro_batches, recipe.batch.size // plan.micro_batches)
    images = random.integers(0, 256, (*shape, size, size, 3), np.uint8)
    labels = random.integers(0, classes, shape).astype(np.int32)
    batch = (*jax.device_put((images, labels), batch_sharding(mesh, axis=2)), np.int32(plan.steps_per_call))
    return steps.train_call(net, plan, optimizer, mesh), state, batch


def _peak_bytes(pod: Pod) -> int:
    stats = pod.devices[0].memory_stats()
    return int(stats.get("peak_bytes_in_use", 0)) if stats else 0
