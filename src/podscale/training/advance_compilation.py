"""Compile parts of a program for GPUs in advance, in threads, so that the program itself compiles sooner.

Two parts of compiling take longest, and XLA remembers both for the whole process:

- It tries all plans of cuDNN for every convolution. `tune_convolutions` compiles each convolution of a traced program
  by itself while Python lowers the program. A lock lets one thread at a time use the GPU for it, so it takes one.
- It compiles one Pallas kernel for Mosaic after the other. `compile_kernels` compiles those of a lowered program by
  themselves, in as many threads as there are cores, while XLA optimizes the program and before it gets to them.

Nothing depends on these parts: what is missing or fails is compiled with the program, which then reports the error.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from podscale.models.jaxpr import iterate_programs
from podscale.plan import Plan
from podscale.processes import host
from podscale.training.program_cache import bypass_program_cache
from podscale.training.step import CompilerOptions

CONVOLUTION = "conv_general_dilated"
SUMS = ("add", "add_any")  # which cuDNN does together with a convolution
MIN_CONVOLUTIONS = 8  # of fewer, not enough is tuned to be worth a thread
TUNING_THREADS = 1  # more take turns at the GPU, and may tune the same convolution at the same time
KERNEL_TARGET = "mosaic_gpu_v2"  # the custom call of a Pallas kernel for Mosaic, as jax 0.11 names it
KERNEL_ATTRIBUTES = "mhlo.backend_config"
KERNEL_HASH = "kernel_hash"  # by which XLA remembers a kernel
ELEMENT_TYPES = MappingProxyType(
    {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32", "i8": "int8", "i1": "bool"}
)


Operation: TypeAlias = Any  # of MLIR, whose types JAX's own declarations leave out


class Part(NamedTuple):
    """A part of a program that can be compiled by itself.

    Attributes:
        compute: the part, as a function of arrays.
        arguments: shapes and types of these arrays.
    """

    compute: Callable[..., object]
    arguments: tuple[jax.ShapeDtypeStruct, ...]


class AdvanceCompiler:
    """Compiles parts of a program in threads. Errors are collected, never raised.

    Args:
        device: what to compile for; None: do nothing at all.
        options: the compiler options of the program. With others, XLA would not find what it has tuned.

    Attributes:
        compiled: how many parts were compiled.
        errors: what was raised in the threads.
    """

    def __init__(self, device: jax.Device | None, options: CompilerOptions) -> None:
        self._device, self._options = device, options
        self._tuner: ThreadPoolExecutor | None = None
        self._kernel_compiler: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self.compiled = 0
        self.errors: list[Exception] = []

    @property
    def is_active(self) -> bool:
        """Whether it compiles anything."""
        return self._device is not None

    def tune_convolutions(self, traced: jax.stages.Traced) -> None:
        """Start to compile the convolutions of a traced program one after the other in a thread."""
        with self._collect_errors():
            parts = list_convolutions(traced.jaxpr.jaxpr) if self._device else []
            if len(parts) >= MIN_CONVOLUTIONS:
                self._tuner = self._tuner or ThreadPoolExecutor(TUNING_THREADS, "podscale-tuning")
                self._start(self._tuner, parts)

    def stop_tuning(self) -> None:
        """Tune no further convolutions.

        To be called before the program is compiled, which tunes the others. If the thread went on beside it, both would
        take turns at the GPU, and could tune the same convolutions twice. The one under way goes on.
        """
        _cancel(self._tuner)

    def compile_kernels(self, programs: Iterable[jax.stages.Lowered]) -> None:
        """Start to compile the Mosaic kernels of lowered programs, several at the same time."""
        with self._collect_errors():
            kernels = {key: part for p in programs for key, part in find_kernels(p).items()} if self._device else {}
            if len(kernels) > 1:
                threads = min(len(kernels), host.count_usable_cores())
                self._kernel_compiler = self._kernel_compiler or ThreadPoolExecutor(threads, "podscale-kernels")
                self._start(self._kernel_compiler, list(kernels.values()))

    def wait(self) -> None:
        """Return once all parts that were started and not stopped are compiled."""
        for pool in (self._tuner, self._kernel_compiler):
            if pool:
                pool.shutdown(wait=True)

    def stop(self) -> None:
        """Start no further part. What is under way is not waited for; only the end of the process waits for it."""
        _cancel(self._tuner)
        _cancel(self._kernel_compiler)

    def _start(self, pool: ThreadPoolExecutor, parts: Sequence[Part]) -> None:
        for part in parts:
            pool.submit(self._compile, part)

    def _compile(self, part: Part) -> None:
        with self._collect_errors():
            with bypass_program_cache():  # a program that is loaded instead of compiled leaves nothing in XLA's memory
                lower_part(part, self._device).compile(self._options or None)
            with self._lock:
                self.compiled += 1

    @contextmanager
    def _collect_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            with self._lock:
                self.errors.append(error)


@contextmanager
def compile_in_advance(plan: Plan, options: CompilerOptions) -> Iterator[AdvanceCompiler]:
    """Give a compiler of parts, which stops at the end of the block; on other devices than GPUs it does nothing.

    Several processes share what XLA tunes, for which all have to compile the same programs in the same order.
    """
    device = plan.pod.devices[0] if plan.pod.devices else None
    is_used = device is not None and device.platform == "gpu" and jax.process_count() == 1
    compiler = AdvanceCompiler(device if is_used else None, options)
    try:
        yield compiler
    finally:
        compiler.stop()


def lower_part(part: Part, device: jax.Device | None) -> jax.stages.Lowered:
    """Return the lowered program of a part for one device."""
    sharding = jax.sharding.SingleDeviceSharding(device) if device else None
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in part.arguments]
    return jax.jit(part.compute).lower(*arguments)


def _cancel(pool: ThreadPoolExecutor | None) -> None:
    if pool:
        pool.shutdown(wait=False, cancel_futures=True)


# --- convolutions --------------------------------------------------------------------------------------------------


def list_convolutions(jaxpr: Jaxpr) -> list[Part]:
    """Return the distinct convolutions of a traced program and of the functions it calls, whose results are used.

    XLA recognizes a gradient by its reversed kernel, and adds what is added to a convolution in the same kernel of
    cuDNN. Both make it another convolution, so both belong to the part.
    """
    parts: dict[object, Part] = {}
    for program in iterate_programs(jaxpr):
        producers = {result: equation for equation in program.eqns for result in equation.outvars}
        roots = {id(root): root for root in _iterate_roots(program)}
        for root in roots.values():
            slice_ = _Slice(root, producers)
            parts.setdefault(slice_.describe(), slice_.make_part())
    return list(parts.values())


def _iterate_roots(program: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the convolutions whose result is used, or the sums that they are a term of."""
    users: dict[Var, list[JaxprEqn]] = {}
    for equation in program.eqns:
        for operand in equation.invars:
            if not isinstance(operand, Literal):
                users.setdefault(operand, []).append(equation)
    results = {result for result in program.outvars if not isinstance(result, Literal)}
    for equation in program.eqns:
        if equation.primitive.name == CONVOLUTION:
            [result] = equation.outvars
            only_user = users[result][0] if len(users.get(result, [])) == 1 and result not in results else None
            if only_user is not None and only_user.primitive.name in SUMS:
                yield only_user
            elif result in users or result in results:
                yield equation


class _Slice:
    """The equations behind a result, from the last one back to operands that no convolution or reversal has made.

    Args:
        root: a convolution, or a sum with a convolution as a term.
        producers: the equation behind each array of the program.
    """

    def __init__(self, root: JaxprEqn, producers: dict[Var, JaxprEqn]) -> None:
        self._producers, self._root = producers, root
        self._equations: list[JaxprEqn] = []
        self._operands: dict[Var, None] = {}
        self._add(root)

    def describe(self) -> object:
        """Return a description that is the same for the same computation on arrays of the same shapes and types."""
        results = [result for equation in self._equations for result in equation.outvars]
        numbers = {array: number for number, array in enumerate([*self._operands, *results])}
        equations = (
            (e.primitive.name, str(e.params), tuple(str(v) if isinstance(v, Literal) else numbers[v] for v in e.invars))
            for e in self._equations
        )
        return tuple(str(array.aval) for array in self._operands), tuple(equations)

    def make_part(self) -> Part:
        """Return the slice as a part."""
        avals = [array.aval for array in self._operands if isinstance(array.aval, jax.core.ShapedArray)]
        arguments = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
        return Part(partial(_evaluate, tuple(self._equations), tuple(self._operands)), arguments)

    def _add(self, equation: JaxprEqn) -> None:
        """Add an equation after those that make its operands."""
        wanted = (CONVOLUTION, "rev") if equation is self._root and equation.primitive.name in SUMS else ("rev",)
        for operand in equation.invars:
            if isinstance(operand, Literal):
                continue
            producer = self._producers.get(operand)
            if producer is None or producer.primitive.name not in wanted:
                self._operands.setdefault(operand)
            elif not any(producer is added for added in self._equations):
                self._add(producer)
        self._equations.append(equation)


def _evaluate(equations: Sequence[JaxprEqn], operands: Sequence[Var], *arrays: jax.Array) -> jax.Array:
    """Return the result of the last equation."""
    values = dict(zip(operands, arrays, strict=True))
    for equation in equations:
        inputs = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
        values[equation.outvars[0]] = equation.primitive.bind(*inputs, **equation.params)
    return values[equations[-1].outvars[0]]


# --- Mosaic kernels ------------------------------------------------------------------------------------------------


def find_kernels(lowered: jax.stages.Lowered) -> dict[bytes, Part]:
    """Return the Mosaic kernels of a lowered program by XLA's key; none where JAX lowers them in a way unknown here."""
    parts: dict[bytes, Part] = {}
    module: Operation = lowered.compiler_ir("stablehlo")
    for call in _iterate_operations(module.operation):
        if call.name != "stablehlo.custom_call" or call.attributes["call_target_name"].value != KERNEL_TARGET:
            continue
        if KERNEL_ATTRIBUTES not in call.attributes:
            continue
        attributes = {item.name: _get_value(item.attr) for item in call.attributes[KERNEL_ATTRIBUTES]}
        key = attributes.get(KERNEL_HASH)
        if isinstance(key, bytes) and key not in parts:
            parts[key] = _make_kernel(call, attributes)
    return parts


def _make_kernel(call: Operation, attributes: dict[str, Operation]) -> Part:
    """Return a part with the same custom call, whose arrays are in row-major order as those of all Mosaic kernels."""
    arguments, results = ([_describe_array(value.type) for value in values] for values in (call.operands, call.results))
    kernel = jax.ffi.ffi_call(KERNEL_TARGET, results)
    return Part(partial(kernel, **attributes), tuple(arguments))


def _describe_array(type_: Operation) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(type_.shape), np.dtype(ELEMENT_TYPES[str(type_.element_type)]))


def _get_value(attribute: Operation) -> Operation:
    """Return the value of an attribute; that of a string as bytes."""
    return attribute.value_bytes if hasattr(attribute, "value_bytes") else attribute.value


def _iterate_operations(operation: Operation) -> Iterator[Operation]:
    """Yield all operations inside of one."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _iterate_operations(inner.operation)
