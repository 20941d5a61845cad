"""Compile the training and evaluation steps, and cache the compiled programs."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import PyTree

from podscale import pod as pods
from podscale.parallel import placement
from podscale.plan import Plan
from podscale.processes import heartbeat, private_jax
from podscale.recipe import list_size_ranges
from podscale.runs.folder import Run
from podscale.training import step as steps
from podscale.training.advance_compilation import AdvanceCompiler, compile_in_advance
from podscale.training.program import Program
from podscale.training.program_cache import share_compilation
from podscale.training.step import CompilerOptions, Metrics, State
from podscale.training.update_rule import bind_scalars, describe_scalars, place_scalars


def make_train_call(program: Program) -> jax.stages.Wrapped:
    """Return the jitted train call of a program, whose last argument is `Scalars`; see `step.make_train_call`."""
    parts = program.net, program.plan, program.optimizer, program.schedule, program.mesh
    return steps.make_train_call(*parts, bind=partial(bind_scalars, program.plan, program.net))


@dataclass(frozen=True)
class CompiledCall:
    """A compiled train call: (state, images, labels, count) -> (state, metrics); see `step.make_train_call`.

    Attributes:
        programs: one for each size of training images.
        constants: its last arguments: the arrays that stay on the devices, and the recipe's numbers.
    """

    programs: Mapping[int, jax.stages.Compiled]
    constants: tuple[PyTree, ...]

    def __call__(self, state: State, images: jax.Array, *more: PyTree) -> tuple[State, Metrics]:
        """Do the updates of one call."""
        result: tuple[State, Metrics] = self._get_program(images)(state, images, *more, *self.constants)
        return result

    def as_text(self) -> str:
        """Return the text of the program for the largest images."""
        return str(self.programs[max(self.programs)].as_text())

    def _get_program(self, images: jax.Array) -> jax.stages.Compiled:
        return self.programs[images.shape[-2]] if len(self.programs) > 1 else next(iter(self.programs.values()))


def compile_train_step(
    program: Program,
    run: Run | None = None,
    options: CompilerOptions | None = None,
    traced: "TracedCalls | None" = None,
) -> CompiledCall:
    """Return the train call, compiled ahead of its first use so that the ledger counts the time as compilation.

    Args:
        program: what to compile.
        run: where deterministic GPU programs are stored.
        options: compiler options in addition to the plan's.
        traced: the calls that are traced already.
    """
    plan = program.plan
    residents = plan.input.place_residents(program.data.train.images, program.mesh)
    constants = *residents, place_scalars(plan, program.mesh)
    chosen = choose_compiler_options(plan, options)
    with nullcontext(traced.advance) if traced else compile_in_advance(plan, chosen) as advance:
        calls = traced.calls.result() if traced else _trace_calls(program, constants, advance)
        lowered = {size: call.lower() for size, call in calls.items()}
        advance.stop_tuning()
        advance.compile_kernels(lowered.values())
        call = CompiledCall(_compile_together(lowered, plan, run, options), constants)
        advance.stop()
    if residents:  # run once on zeros: what a device loads at first use is no part of training
        state, images, labels, _ = next(iter(_describe_arguments(program).values()))
        jax.block_until_ready(call(*zeros_like((state, images, labels)), np.int32(1)))
    return call


@dataclass(frozen=True)
class TracedCalls:
    """The train calls of a program, which a thread traces.

    Attributes:
        calls: the call for each size of training images.
        advance: what compiles parts of them meanwhile.
    """

    calls: Future[dict[int, jax.stages.Traced]]
    advance: AdvanceCompiler


@contextmanager
def trace_in_advance(program: Program, *, is_used: bool = True) -> Iterator[TracedCalls | None]:
    """Trace the train calls in a thread, and tune their convolutions, while the state is initialized.

    Only where convolutions are tuned at all; a program that takes arrays of images is traced with them, later.
    """
    plan = program.plan
    with compile_in_advance(plan, choose_compiler_options(plan)) as advance:
        if not is_used or not advance.is_active or plan.input.is_resident:
            yield None
            return
        constants = (describe_scalars(plan, program.mesh),)
        with ThreadPoolExecutor(1, "podscale-tracing") as pool:
            if pool.submit(private_jax.get_trace_settings).result() != private_jax.get_trace_settings():
                yield None  # the caller has settings for its own thread, such as a precision of matrix products
            else:
                yield TracedCalls(pool.submit(_trace_calls, program, constants, advance), advance)


def _trace_calls(
    program: Program, constants: tuple[PyTree, ...], advance: AdvanceCompiler
) -> dict[int, jax.stages.Traced]:
    """Return the traced train call for each size of images; on GPUs, convolutions are tuned from then on."""
    traced = {}
    for size, arguments in _describe_arguments(program).items():
        traced[size] = make_train_call(program).trace(*arguments, *constants)
        advance.tune_convolutions(traced[size])
    return traced


def _describe_arguments(program: Program) -> dict[int, tuple[PyTree, ...]]:
    """Return the shapes of state, images, labels and count for each size of training images."""
    plan, state = program.plan, program.describe_state()
    ranges = list_size_ranges(plan.recipe, plan.counts.train)
    return {r.size: (state, *steps.describe_call_arguments(plan, program.mesh, r.size)[:3]) for r in ranges}


def _compile_together(
    lowered: Mapping[int, jax.stages.Lowered], plan: Plan, run: Run | None, options: CompilerOptions | None
) -> dict[int, jax.stages.Compiled]:
    """Return the compiled programs of all sizes of images; several are compiled at the same time."""
    if len(lowered) == 1:
        return {size: compile_program(program, plan, run, options) for size, program in lowered.items()}
    compilations = {size: Compilation(program, plan, run, options) for size, program in lowered.items()}
    for compilation in compilations.values():
        compilation.wait()  # for all of them, before one raises
    return {size: compilation.get() for size, compilation in compilations.items()}


def compile_eval_step(program: Program, run: Run | None = None) -> tuple["Compilation", tuple[PyTree, ...]]:
    """Compile the evaluation of one batch (`plan.eval_images` per device); return it and its arguments as shapes."""
    size, count = program.plan.recipe.data.image_size, program.plan.eval_images * program.plan.pod.size
    sharding, state = pods.make_batch_sharding(program.mesh), program.describe_state()
    images = jax.ShapeDtypeStruct((count, size, size, 3), np.uint8, sharding=sharding)
    labels = jax.ShapeDtypeStruct((count,), np.int32, sharding=sharding)
    counts = placement.replicate(steps.zero_counts(), program.mesh)
    arguments = state.params, state.stats, images, labels, counts
    lowered = steps.make_eval_call(program.net, program.plan, program.mesh).lower(*arguments)
    return Compilation(lowered, program.plan, run), arguments


class Compilation:
    """A program that is being compiled in a thread of its own, so that another one can be compiled meanwhile.

    Several processes compile their programs in the same order, one after the other, and so without a thread.
    """

    def __init__(
        self, lowered: jax.stages.Lowered, plan: Plan, run: Run | None, options: CompilerOptions | None = None
    ) -> None:
        self._arguments = lowered, plan, run, options
        self._program: jax.stages.Compiled | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._compile, name="podscale-compilation", daemon=True)
        if jax.process_count() > 1 or plan.options.deterministic:  # a deterministic program has its own cache
            self._compile()
        else:
            self._thread.start()

    def wait(self) -> None:
        """Return once the program is compiled, or cannot be."""
        if self._thread.ident is not None:
            self._thread.join()

    def get(self) -> jax.stages.Compiled:
        """Return the program once it is compiled.

        Raises:
            Exception: what the compiler raised.
        """
        self.wait()
        if self._error:
            raise self._error
        assert self._program is not None, "compiled, or an error"
        return self._program

    def _compile(self) -> None:
        try:
            self._program = compile_program(*self._arguments)
        except Exception as error:
            self._error = error


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
    chosen = choose_compiler_options(plan, options) or None
    if _is_deterministic_on_gpu(plan):
        with cache_programs_in(run.programs) if run else nullcontext():
            program = lowered.compile(chosen)
    else:
        is_shared = jax.default_backend() == "cpu" and jax.process_count() > 1  # others tune together as they compile
        with share_compilation(heartbeat.check_generation) if is_shared else nullcontext():
            program = lowered.compile(chosen)
    heartbeat.wait_for_peers()  # some processes compile longer than others
    return program


def choose_compiler_options(plan: Plan, options: CompilerOptions | None = None) -> CompilerOptions:
    """Return the plan's compiler options, and these in addition."""
    deterministic: CompilerOptions = (
        {"xla_gpu_exclude_nondeterministic_ops": True} if _is_deterministic_on_gpu(plan) else {}
    )
    return steps.make_compiler_options(plan) | deterministic | (options or {})


def _is_deterministic_on_gpu(plan: Plan) -> bool:
    return plan.options.deterministic and jax.default_backend() == "gpu"


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
