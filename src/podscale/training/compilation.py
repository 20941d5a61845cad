"""Compile the training and evaluation steps, and cache what was compiled."""

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
from podscale.training.device_input import resident
from podscale.training.setup import Job


def compile_train_step(job: Job, run: Run | None = None, options: dict[str, Any] | None = None) -> Any:
    """The train call, compiled ahead of its first use, so that its time is booked as what it is."""
    pictures = [resident.placed(job.data.train, job.mesh)] if job.plan.resident else []
    call = steps.train_call(job.net, job.plan, job.optimizer, job.schedule, job.mesh)
    batch = steps.call_arguments(job.plan, job.mesh)[:3]
    program = compile_program(call.lower(job.state, *batch, *pictures), job.plan, run, options)
    return _warm_up(job, lambda *batch: program(*batch, *pictures), *batch) if pictures else program


def _warm_up(job: Job, call: Callable[..., Any], picks: Any, labels: Any, _: Any) -> Callable[..., Any]:
    """The call, after it was used on zeros: what a device loads at first use is no part of training."""
    jax.block_until_ready(call(*zeros_like((job.state, picks, labels)), np.int32(1)))
    return call


def zeros_like(like: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), like)


def compile_program(lowered: Any, plan: Plan, run: Run | None, options: dict[str, Any] | None = None) -> Any:
    """The program. If the plan is to be deterministic and runs on GPUs, the very one that the run began with.

    GPU programs differ from one compilation to the next in the algorithms that happened to be fastest when they were
    tried. So they are kept in the run, where the next session finds them, and algorithms whose sums come out in another
    order each time are not tried at all.
    """
    if plan.deterministic and jax.default_backend() == "gpu":
        wanted = {"xla_gpu_exclude_nondeterministic_ops": True} | (options or {})
        with cache_programs_in(run.programs) if run else nullcontext():
            program = lowered.compile(wanted)
    else:
        program = lowered.compile(steps.compiler_options(plan) | (options or {}) or None)
    heartbeat.meet()  # some compile longer than others
    return program


@contextmanager
def cache_programs_in(folder: Path) -> Iterator[None]:
    """What is compiled meanwhile is looked up in this folder, and kept there."""
    wanted = {"jax_compilation_cache_dir": str(folder.absolute()), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in wanted}
    _set_cache(wanted)
    try:
        yield
    finally:
        _set_cache(before)


def _set_cache(settings: dict[str, Any]) -> None:
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)


def compile_eval_step(job: Job, run: Run | None = None) -> tuple[Any, tuple[Any, ...]]:
    """The evaluation of so many pictures as the plan has for it at a time, and arrays like what it takes."""
    size, count = job.recipe.data.image_size, job.plan.eval_images * job.plan.pod.size
    sharding = pods.batch_sharding(job.mesh)
    images = jax.ShapeDtypeStruct((count, size, size, 3), np.uint8, sharding=sharding)
    labels = jax.ShapeDtypeStruct((count,), np.int32, sharding=sharding)
    nothing = placement.replicate(steps.empty_tally(), job.mesh)
    like = job.state.params, job.state.stats, images, labels, nothing
    return compile_program(steps.eval_call(job.net, job.plan, job.mesh).lower(*like), job.plan, run), like
