"""Parts of a program that are compiled in advance: they are found, are the same computations, and change nothing."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from training.test_invariants import make_small_recipe

from podscale import pod as pods
from podscale.config.options import Options
from podscale.models.jaxpr import iterate_equations
from podscale.plan import Counts, make_plan
from podscale.planner import topologies
from podscale.pod import Pod
from podscale.recipe import load_recipe
from podscale.training import advance_compilation, compilation, step
from podscale.training.advance_compilation import AdvanceCompiler, Part, compile_in_advance, list_convolutions
from podscale.training.program_cache import ProgramCache, bypass_program_cache
from podscale.training.setup import describe_program, prepare
from podscale.training.update_rule import describe_scalars

H200 = Pod("h200", 1, 1, memory_bytes=141 << 30)
WIDTHS = (4, 6, 8)


def convolve(images, kernel, stride=1):
    return lax.conv_general_dilated(
        images, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@jax.custom_vjp
def double(images):
    return 2 * images


double.defvjp(lambda images: (double(images), None), lambda _, gradient: (2 * gradient,))


@jax.custom_vjp
def convolve_with_stride(images, kernel):
    return convolve(images, kernel, stride=2)


convolve_with_stride.defvjp(
    lambda images, kernel: (convolve(images, kernel, stride=2), (images, kernel)),
    lambda saved, gradient: jax.vjp(lambda x, k: convolve(x, k, 2), *saved)[1](gradient),
)


def compute_loss(kernels, images):
    """Two equal blocks with a residual in a loop, and a strided convolution as a custom_vjp that is computed again."""
    first, block, last = kernels
    hidden = double(jnp.tanh(convolve(images, first)))

    def add_block(hidden, kernel):
        return hidden + convolve(jnp.tanh(hidden), kernel), None

    hidden, _ = lax.scan(add_block, hidden, block)
    return jnp.sum(jax.checkpoint(convolve_with_stride)(hidden, last) ** 2)


def make_arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    narrow, middle, wide = WIDTHS
    shapes = (3, 3, narrow, middle), (2, 3, 3, middle, middle), (1, 1, middle, wide)
    kernels = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
    return kernels, jax.random.normal(keys[3], (2, 8, 8, narrow))


@pytest.fixture(scope="module")
def traced():
    step = jax.jit(jax.grad(compute_loss, argnums=(0, 1)))
    return step.trace(*make_arguments())


def name_equations(part):
    """The primitives of a part in the order of the trace, and the shape of its result."""
    jaxpr = jax.make_jaxpr(part.compute)(*part.arguments)
    return [e.primitive.name for e in jaxpr.eqns], jaxpr.out_avals[0].shape


def test_each_distinct_convolution_is_found_once_with_its_reversed_kernel_and_the_sum_it_is_a_term_of(traced):
    described = sorted((names, shape) for names, shape in map(name_equations, list_convolutions(traced.jaxpr.jaxpr)))
    convolution = "conv_general_dilated"
    assert described == sorted(
        [
            ([convolution], (2, 8, 8, 6)),  # the first
            ([convolution], (3, 3, 4, 6)),  # its gradient by the kernel
            (["rev", convolution], (2, 8, 8, 4)),  # its gradient by the images
            ([convolution, "add"], (2, 8, 8, 6)),  # the block with its residual
            ([convolution], (3, 3, 6, 6)),
            (["rev", convolution], (2, 8, 8, 6)),
            ([convolution], (1, 1, 6, 8)),  # the convolve_with_stride one, whose own result the gradient needs
            (["rev", convolution], (2, 8, 8, 6)),
            ([convolution], (2, 4, 4, 8)),
        ]
    )


def test_convolutions_whose_result_is_unused_are_no_parts():
    """XLA removes them; a fused layer's forward pass leaves them in the trace."""
    images, kernel = make_arguments()[1], make_arguments()[0][0]
    traced = jax.jit(lambda images, kernel: (convolve(images, kernel), images)[1]).trace(images, kernel)
    assert [e.primitive.name for e in iterate_equations(traced.jaxpr.jaxpr)] == ["conv_general_dilated"]
    assert list_convolutions(traced.jaxpr.jaxpr) == []


@pytest.mark.parametrize("stride", [1, 2])
def test_parts_compute_what_the_program_computes(stride):
    """Gradients of one convolution, and sums of two: each part, compiled by itself, has the program's own values."""
    keys = jax.random.split(jax.random.key(1), 3)
    images, kernel = jax.random.normal(keys[0], (2, 8, 8, 3)), jax.random.normal(keys[1], (3, 3, 3, 5))
    other = jax.random.normal(keys[2], (1, 1, 3, 5))

    def add(images, kernel, other):
        return convolve(images, kernel, stride) + convolve(images, other, stride)

    def differentiate(images, kernel, other):
        result, pull = jax.vjp(add, images, kernel, other)
        return result, *pull(jnp.cos(result))

    expected = differentiate(images, kernel, other)
    gradient = jnp.cos(expected[0])
    pool = {array.shape: array for array in (images, kernel, other, gradient)}
    parts = list_convolutions(jax.jit(differentiate).trace(images, kernel, other).jaxpr.jaxpr)
    results = {}
    for part in parts:
        compiled = advance_compilation.lower_part(part, jax.devices()[0]).compile()
        value = compiled(*(pool[a.shape] for a in part.arguments))
        results[value.shape] = value
    assert len(parts) == 4  # sum of both, gradients of both kernels, sum of both gradients of the images
    for value in expected:
        np.testing.assert_allclose(results[value.shape], value, rtol=1e-5, atol=1e-5)


def list_tuned(text):
    """Convolutions of an optimized program as XLA tunes them: types of operands and result, and attributes."""
    types = dict(re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\S+)", text, re.MULTILINE))
    calls = re.findall(r"= (.*?) custom-call\((.*?)\), (.*__cudnn\$conv.*)$", text, re.MULTILINE)
    return {
        (
            re.sub(r",? u8\[\d+\]\{0\}", "", result),  # scratch memory
            tuple(types.get(name, name) for name in re.findall(r"%([\w.\-]+)", operands)),
            re.sub(r", metadata=\{.*?\}|\"\w+_id\":\"?\d+\"?,?", "", attributes),
        )
        for result, operands, attributes in calls
    }


@pytest.mark.heavy
@pytest.mark.skipif(bool(topologies.explain_no_compiler(H200)), reason=topologies.NO_CUDA)
def test_parts_have_the_very_convolutions_that_xla_tunes_in_the_step():
    """Compiled for a GPU that is only described; a ResNet-50 has all kinds: strides, residuals, projections."""
    recipe = load_recipe("imagefolder").override({"data.image_size": 32, "batch.size": 8, "batch.span": 8})
    plan = make_plan(recipe, topologies.describe_pod(H200), Counts(64, 64, 10), Options(orthogonalize="device"))
    program, options = describe_program(replace(plan, kernels=None)), topologies.get_compiler_options(plan.pod)
    batch = step.describe_call_arguments(plan, program.mesh)
    scalars = describe_scalars(plan, program.mesh)
    traced = compilation.make_train_call(program).trace(program.describe_state(), *batch, scalars)
    tuned = set()
    for part in list_convolutions(traced.jaxpr.jaxpr):
        lowered = advance_compilation.lower_part(part, plan.pod.devices[0])
        tuned |= list_tuned(lowered.compile(options).as_text())
    assert len(tuned) > 40
    assert tuned == list_tuned(traced.lower().compile(options).as_text())


def test_every_part_is_compiled_in_one_thread_apart_from_the_caller(traced, monkeypatch):
    threads, lower_part = [], advance_compilation.lower_part

    def record_thread(part, device):
        threads.append(threading.current_thread())
        return lower_part(part, device)

    monkeypatch.setattr(advance_compilation, "lower_part", record_thread)
    compiler = AdvanceCompiler(jax.devices()[0], {})
    compiler.tune_convolutions(traced)
    compiler.wait()
    assert (compiler.compiled, compiler.errors) == (len(list_convolutions(traced.jaxpr.jaxpr)), [])
    assert len(threads) == compiler.compiled
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


def test_programs_with_few_convolutions_are_left_alone():
    images, kernel = jnp.zeros((1, 4, 4, 3)), jnp.zeros((3, 3, 3, 3))
    compiler = AdvanceCompiler(jax.devices()[0], {})
    compiler.tune_convolutions(jax.jit(convolve).trace(images, kernel))
    compiler.wait()
    assert (compiler.compiled, compiler.errors) == (0, [])


def test_an_error_in_a_part_is_collected_and_stops_no_other(traced, monkeypatch):
    list_all = list_convolutions

    def fail(array):
        raise MemoryError("a part is too large")

    broken = Part(fail, (jax.ShapeDtypeStruct((2,), jnp.float32),))
    monkeypatch.setattr(advance_compilation, "list_convolutions", lambda jaxpr: [broken, *list_all(jaxpr)])
    compiler = AdvanceCompiler(jax.devices()[0], {})
    compiler.tune_convolutions(traced)
    compiler.wait()
    assert [str(error) for error in compiler.errors] == ["a part is too large"]
    assert compiler.compiled == len(list_all(traced.jaxpr.jaxpr))


def test_a_program_that_cannot_be_searched_for_parts_is_an_error_that_is_collected():
    compiler = AdvanceCompiler(jax.devices()[0], {})
    compiler.tune_convolutions(SimpleNamespace(jaxpr=None))
    compiler.compile_kernels([SimpleNamespace()])
    assert [type(error) for error in compiler.errors] == [AttributeError, AttributeError]


def test_no_part_starts_once_it_is_stopped(traced, monkeypatch):
    started, may_end, lower_part = threading.Event(), threading.Event(), advance_compilation.lower_part

    def wait_and_lower(part, device):
        started.set()
        assert may_end.wait(60)
        return lower_part(part, device)

    monkeypatch.setattr(advance_compilation, "lower_part", wait_and_lower)
    compiler = AdvanceCompiler(jax.devices()[0], {})
    compiler.tune_convolutions(traced)
    assert started.wait(60)
    compiler.stop_tuning()
    may_end.set()
    compiler.wait()
    assert (compiler.compiled, compiler.errors) == (1, [])


def test_an_error_while_the_program_is_compiled_stops_its_parts(traced, monkeypatch):
    pools, lower_part = [], advance_compilation.lower_part

    class RecordedPool(ThreadPoolExecutor):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            pools.append(self)

    monkeypatch.setattr(advance_compilation, "ThreadPoolExecutor", RecordedPool)
    plan = SimpleNamespace(pod=SimpleNamespace(devices=(SimpleNamespace(platform="gpu"),)))
    monkeypatch.setattr(advance_compilation, "lower_part", lambda part, _: lower_part(part, jax.devices()[0]))

    def interrupt():
        with compile_in_advance(plan, {}) as compiler:
            compiler.tune_convolutions(traced)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    with pytest.raises(RuntimeError, match="shutdown"):
        pools[0].submit(print)
    pools[0].shutdown(wait=True)


@pytest.mark.heavy
def test_nothing_is_compiled_in_advance_on_cpus(monkeypatch):
    monkeypatch.setattr(advance_compilation, "ThreadPoolExecutor", None)  # would raise, if called
    for name in ("list_convolutions", "find_kernels"):
        monkeypatch.setattr(advance_compilation, name, None)
    compilers, collect = [], AdvanceCompiler.__init__

    def record(self, *arguments):
        collect(self, *arguments)
        compilers.append(self)

    monkeypatch.setattr(AdvanceCompiler, "__init__", record)
    program = prepare(make_small_recipe(), pods.make_pod(jax.devices(), "1x1"))
    compilation.compile_train_step(program)
    assert [(compiler.compiled, compiler.errors) for compiler in compilers] == [(0, [])]


def test_parts_are_neither_looked_up_in_the_program_cache_nor_stored(tmp_path):
    cache = ProgramCache(tmp_path)
    cache.put("jit_f-1", b"program")
    with bypass_program_cache():
        cache.put("jit_part-2", b"part")
        assert cache.get("jit_f-1") is None
    assert (cache.get("jit_f-1"), cache.get("jit_part-2")) == (b"program", None)


# --- Mosaic kernels ------------------------------------------------------------------------------------------------

CALL_ATTRIBUTES = "call_target_name", "mhlo.backend_config", "api_version", "operand_layouts", "result_layouts"
KERNEL = {"kernel_hash": b"\xac\x00\xff", "module": b"ML\xefR\x01", "use_custom_barrier": False}


def lower_kernels(*kernels):
    """A program with custom calls as those of Mosaic kernels, lowered for GPUs without one."""

    def call(images, weights):
        outputs = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.float32)
        for attributes in kernels:
            images, _ = jax.ffi.ffi_call("mosaic_gpu_v2", outputs)(images, weights, **attributes)
        return lax.fori_loop(0, 2, lambda _, x: jax.ffi.ffi_call("another", outputs)(x, weights)[0], images)

    shapes = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16), jax.ShapeDtypeStruct((4, 4), jnp.int8)
    return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",))


def list_calls(lowered):
    """Text of each of the custom calls, without the names of its operands."""
    operations = advance_compilation._iterate_operations(lowered.compiler_ir("stablehlo").operation)
    calls = [o for o in operations if o.name == "stablehlo.custom_call"]
    return [
        (
            {name: str(call.attributes[name]) for name in CALL_ATTRIBUTES},
            [str(v.type) for v in call.operands],
            [str(v.type) for v in call.results],
        )
        for call in calls
        if call.attributes["call_target_name"].value == "mosaic_gpu_v2"
    ]


def test_each_distinct_mosaic_kernel_is_found_once_with_the_attributes_and_types_of_its_call():
    other = KERNEL | {"kernel_hash": b"other", "use_custom_barrier": True}
    lowered = lower_kernels(KERNEL, other, KERNEL)
    kernels = advance_compilation.find_kernels(lowered)
    assert list(kernels) == [KERNEL["kernel_hash"], other["kernel_hash"]]
    calls = [
        list_calls(jax.jit(part.compute).trace(*part.arguments).lower(lowering_platforms=("cuda",)))
        for part in kernels.values()
    ]
    expected = list_calls(lowered)
    assert [call for [call] in calls] == expected[:2]
    assert expected[0] == expected[2]


def test_programs_without_kernels_have_none(traced):
    assert advance_compilation.find_kernels(traced.lower()) == {}


def test_kernels_that_cannot_be_compiled_here_are_errors_that_are_collected():
    compiler = AdvanceCompiler(jax.devices()[0], {})
    compiler.compile_kernels([lower_kernels(KERNEL, KERNEL | {"kernel_hash": b"other"})])
    compiler.wait()
    assert compiler.compiled == 0
    assert len(compiler.errors) == 2
    assert all("mosaic_gpu_v2" in str(error) for error in compiler.errors)


def test_a_kernel_lowered_in_an_unknown_way_is_no_part():
    assert advance_compilation.find_kernels(lower_kernels({"module": b"without a hash"})) == {}
