"""Compile the training and evaluation steps, and cache the compiled programs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import PyTree

from podscale import pod as pods
from podscale.parallel import placement
from podscale.plan import Plan
from podscale.processes import heartbeat
from podscale.recipe import list_size_ranges
from podscale.runs.folder import Run
from podscale.training import step as steps
from podscale.training.program import Program
from podscale.training.step import CompilerOptions


def make_train_call(program: Program, *, takes_seed: bool = False) -> jax.stages.Wrapped:
    """Return the jitted train call of a program; see `step.make_train_call`."""
    parts = program.net, program.plan, program.optimizer, program.schedule, program.mesh
    return steps.make_train_call(*parts, takes_seed=takes_seed)


def compile_train_step(program: Program, run: Run | None = None, options: CompilerOptions | None = None) -> Any:
    """Return the train call, compiled ahead of its first use so that the ledger books the time as compilation.

    Args:
        program: what to compile.
        run: where deterministic GPU programs are stored.
        options: compiler options in addition to the plan's.

    Returns:
        A function (state, images, labels, count) -> (state, metrics); see `step.make_train_call`. It already holds the
        arrays that stay on the devices. It is one program for each size of training images.
    """
    plan, state = program.plan, program.describe_state()
    residents = plan.input.place_residents(program.data.train.images, program.mesh)
    ranges = list_size_ranges(plan.recipe, plan.counts.train)
    batches = {r.size: steps.describe_call_arguments(plan, program.mesh, r.size)[:3] for r in ranges}
    lowered = {size: make_train_call(program).lower(state, *batch, *residents) for size, batch in batches.items()}
    compiled = {size: compile_program(call, plan, run, options) for size, call in lowered.items()}
    (size, batch), *others = batches.items()
    if others:
        return lambda state, images, *more: compiled[images.shape[-2]](state, images, *more)
    if not residents:
        return compiled[size]

    def call(*arguments: Any) -> Any:
        return compiled[size](*arguments, *residents)

    # Run once on zeros: what a device loads at first use is no part of training.
    jax.block_until_ready(call(*zeros_like((state, *batch[:2])), np.int32(1)))
    return call


def compile_eval_step(program: Program, run: Run | None = None) -> tuple[jax.stages.Compiled, tuple[PyTree, ...]]:
    """Return the compiled evaluation of one batch (`plan.eval_images` per device), and its arguments as shapes."""
    size, count = program.plan.recipe.data.image_size, program.plan.eval_images * program.plan.pod.size
    sharding, state = pods.make_batch_sharding(program.mesh), program.describe_state()
    images = jax.ShapeDtypeStruct((count, size, size, 3), np.uint8, sharding=sharding)
    labels = jax.ShapeDtypeStruct((count,), np.int32, sharding=sharding)
    counts = placement.replicate(steps.zero_counts(), program.mesh)
    arguments = state.params, state.stats, images, labels, counts
    lowered = steps.make_eval_call(program.net, program.plan, program.mesh).lower(*arguments)
    return compile_program(lowered, program.plan, run), arguments


def zeros_like(tree: PyTree) -> PyTree:
    """Return zeros of the same shapes, types and shardings; arrays may be abstract."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), tree)


def compile_program(
    lowered: jax.stages.Lowered, plan: Plan, run: Run | None, options: CompilerOptions | None = None
) -> jax.stages.Compiled:
    """Compile a lowered program. A deterministic plan on GPUs gets the same program that the run started with.

    GPU programs differ from one compilation to the next in the algorithms that happened to be fastest when they were
    tried. So they are stored in the run, where the next session finds them, and algorithms that add in another order
    each time are not tried at all.
    """
    if plan.options.deterministic and jax.default_backend() == "gpu":
        deterministic: CompilerOptions = {"xla_gpu_exclude_nondeterministic_ops": True} | (options or {})
        with cache_programs_in(run.programs) if run else nullcontext():
            program = lowered.compile(deterministic)
    else:
        program = lowered.compile(steps.make_compiler_options(plan) | (options or {}) or None)
    heartbeat.wait_for_peers()  # some processes compile longer than others
    return program


@contextmanager
def cache_programs_in(folder: Path) -> Iterator[None]:
    """Look up programs in this folder, and store there what is compiled inside the block."""
    settings = {"jax_compilation_cache_dir": str(folder.absolute()), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    _set_cache(settings)
    try:
        yield
    finally:
        _set_cache(before)


def _set_cache(settings: Mapping[str, object]) -> None:
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
