"""Compile the training and evaluation steps, and cache the compiled programs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from podscale import pod as pods
from podscale.parallel import placement
from podscale.plan import Plan
from podscale.processes import heartbeat
from podscale.runs.folder import Run
from podscale.training import step as steps
from podscale.training.setup import Setup


def compile_train_step(setup: Setup, run: Run | None = None, options: dict[str, Any] | None = None) -> Any:
    """Return the train call, compiled ahead of its first use so that the ledger books the time as compilation.

    Args:
        setup: what to compile.
        run: where deterministic GPU programs are stored.
        options: compiler options in addition to the plan's.

    Returns:
        A function (state, images, labels, count) -> (state, metrics); see `step.make_train_call`. It already holds the
        arrays that stay on the devices.
    """
    plan = setup.plan
    residents = plan.input.place_residents(setup.data.train.images, setup.mesh)
    call = steps.make_train_call(setup.net, plan, setup.optimizer, setup.schedule, setup.mesh)
    batch = steps.describe_call_arguments(plan, setup.mesh)[:3]
    program = compile_program(call.lower(setup.state, *batch, *residents), plan, run, options)
    return _warm_up(setup, lambda *batch: program(*batch, *residents), *batch) if residents else program


def _warm_up(setup: Setup, call: Callable[..., Any], picks: Any, labels: Any, _: Any) -> Callable[..., Any]:
    """Run the call once on zeros and return it: what a device loads at first use is no part of training."""
    jax.block_until_ready(call(*zeros_like((setup.state, picks, labels)), np.int32(1)))
    return call


def compile_eval_step(setup: Setup, run: Run | None = None) -> tuple[Any, tuple[Any, ...]]:
    """Return the compiled evaluation of one batch (`plan.eval_images` per device), and its arguments as shapes."""
    size, count = setup.recipe.data.image_size, setup.plan.eval_images * setup.plan.pod.size
    sharding = pods.make_batch_sharding(setup.mesh)
    images = jax.ShapeDtypeStruct((count, size, size, 3), np.uint8, sharding=sharding)
    labels = jax.ShapeDtypeStruct((count,), np.int32, sharding=sharding)
    counts = placement.replicate(steps.zero_counts(), setup.mesh)
    arguments = setup.state.params, setup.state.stats, images, labels, counts
    lowered = steps.make_eval_call(setup.net, setup.plan, setup.mesh).lower(*arguments)
    return compile_program(lowered, setup.plan, run), arguments


def zeros_like(tree: Any) -> Any:
    """Return zeros of the same shapes, types and shardings; arrays may be abstract."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), tree)


def compile_program(lowered: Any, plan: Plan, run: Run | None, options: dict[str, Any] | None = None) -> Any:
    """Compile a lowered program. A deterministic plan on GPUs gets the same program that the run started with.

    GPU programs differ from one compilation to the next in the algorithms that happened to be fastest when they were
    tried. So they are stored in the run, where the next session finds them, and algorithms that add in another order
    each time are not tried at all.
    """
    if plan.options.deterministic and jax.default_backend() == "gpu":
        deterministic = {"xla_gpu_exclude_nondeterministic_ops": True} | (options or {})
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


def _set_cache(settings: dict[str, Any]) -> None:
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
