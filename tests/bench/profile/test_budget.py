"""The budget of a step: programs parsed from their text, traces of real work, and sums checked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podscale import pod as pods
from podscale.bench import step
from podscale.bench.profile import budget as budgets
from podscale.bench.profile import trace
from podscale.bench.profile.program import CONVOLUTIONS, Program
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.recipe import load_recipe

# What XLA makes of one convolution and its gradients on an NVIDIA GPU, shortened.
CUDNN = """
HloModule jit_call

%fused_statistics (p0: bf16[8,16,16,32]) -> (f32[32], f32[32]) {
  %p0 = bf16[8,16,16,32]{3,2,1,0} parameter(0)
  %c = f32[8,16,16,32]{3,2,1,0} convert(%p0), metadata={op_name="jit(call)/jvp(batch_norm)/convert"}
  %r = f32[32]{0} reduce(%c, %zero), dimensions={0,1,2}, to_apply=%add, metadata={op_name="jit(call)/batch_norm/sum"}
  ROOT %t = (f32[32]{0}, f32[32]{0}) tuple(%r, %r)
}

%fused_apply (p1: bf16[8,16,16,32], p2: f32[32]) -> bf16[8,16,16,32] {
  %p1 = bf16[8,16,16,32]{3,2,1,0} parameter(0)
  %p2 = f32[32]{0} parameter(1)
  ROOT %m = bf16[8,16,16,32]{3,2,1,0} multiply(%p1, %p2), metadata={op_name="jit(call)/batch_norm/mul"}
}

%fused_update (p3: f32[3,3,16,32]) -> f32[3,3,16,32] {
  %p3 = f32[3,3,16,32]{3,2,1,0} parameter(0)
  ROOT %s = f32[3,3,16,32]{3,2,1,0} multiply(%p3, %p3), metadata={op_name="jit(call)/optimizer/mul"}
}

%fused_copy (p4: f32[4,8]) -> f32[8,4] {
  %p4 = f32[4,8]{1,0} parameter(0)
  ROOT %tr = f32[8,4]{1,0} transpose(%p4), dimensions={1,0}
}

ENTRY %main (x: bf16[8,16,16,16], w: bf16[3,3,16,32]) -> bf16[8,16,16,32] {
  %x = bf16[8,16,16,16]{3,2,1,0} parameter(0)
  %w = bf16[3,3,16,32]{3,2,1,0} parameter(1)
  %dy = bf16[8,16,16,32]{3,2,1,0} parameter(2)
  %cudnn-conv.1 = (bf16[8,16,16,32]{3,2,1,0}, u8[1024]{0}) custom-call(%x, %w), LABELS, custom_call_target="FORWARD"
  %cudnn-conv.2 = (bf16[8,16,16,16]{3,2,1,0}, u8[0]{0}) custom-call(%dy, %w), LABELS, custom_call_target="INPUT"
  %cudnn-conv.3 = (bf16[3,3,16,32]{3,2,1,0}, u8[0]{0}) custom-call(%x, %dy), LABELS, custom_call_target="FILTER"
  %statistics = (f32[32]{0}, f32[32]{0}) fusion(%dy), kind=kInput, calls=%fused_statistics
  %apply = bf16[8,16,16,32]{3,2,1,0} fusion(%dy, %gte), kind=kLoop, calls=%fused_apply
  %update = f32[3,3,16,32]{3,2,1,0} fusion(%k), kind=kLoop, calls=%fused_update
  %moved = f32[8,4]{1,0} fusion(%q), kind=kLoop, calls=%fused_copy
  %pool = bf16[8,8,8,32]{3,2,1,0} reduce-window(%dy, %zero), window={size=1x3x3x1}
  %sum = f32[100]{0} all-reduce-start(%g), replica_groups={{0,1}}
  ROOT %gemm = (f32[8,10]{1,0}, s8[0]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm"
}
"""
for _short, _long in {
    "LABELS": "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
    "FORWARD": "__cudnn$convForward",
    "INPUT": "__cudnn$convBackwardInput",
    "FILTER": "__cudnn$convBackwardFilter",
}.items():
    CUDNN = CUDNN.replace(_short, _long)


@pytest.fixture(scope="module")
def cudnn():
    return Program(CUDNN)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn-conv.1", "convolution forward"),
        ("cudnn-conv.2", "data gradient"),
        ("cudnn-conv.3", "weight gradient"),
        ("statistics", "reduction"),
        ("apply", "normalization"),
        ("update", "optimizer"),
        ("moved", "copy"),
        ("pool", "pooling"),
        ("sum", "summation"),
        ("gemm", "matrix product"),
    ],
)
def test_an_instructions_kind_follows_from_its_operations(cudnn, name, kind):
    assert cudnn.instructions[name].kind == kind


@pytest.mark.parametrize("name", ["cudnn-conv.1", "cudnn-conv.2", "cudnn-conv.3"])
def test_a_convolution_and_its_gradients_cost_the_same(cudnn, name):
    assert cudnn.instructions[name].flops == 2 * (8 * 16 * 16 * 32) * (3 * 3 * 16)


def test_bytes_are_those_of_operands_and_results(cudnn):
    x, w, y = 2 * 8 * 16 * 16 * 16, 2 * 3 * 3 * 16 * 32, 2 * 8 * 16 * 16 * 32
    assert cudnn.instructions["cudnn-conv.1"].bytes == x + w + y + 1024
    assert cudnn.instructions["statistics"].bytes == y + 2 * 4 * 32


def compile_program():
    """Compile a convolution, a dense layer and their gradients for this machine."""

    def loss(kernel, dense, x):
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(jnp.tanh(y.reshape(len(x), -1) @ dense))

    arguments = jnp.ones((3, 3, 8, 16)), jnp.ones((16 * 16 * 16, 10)), jnp.ones((4, 16, 16, 8))
    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile(), arguments


def test_a_real_program_is_parsed_completely():
    program, _ = compile_program()
    text = program.as_text()
    result = Program(text)
    assert len(result.instructions) == sum(
        " = " in line and not line.startswith("HloModule") for line in text.splitlines()
    )
    entry = [inner for name, body in result.computations.items() if f"ENTRY %{name} " in text for inner in body]
    convolution = 2 * (4 * 16 * 16 * 16) * (3 * 3 * 8)
    product = 2 * 4 * (16 * 16 * 16) * 10
    whole = sum(instruction.flops for instruction in entry)
    # Forward and weight gradient of the convolution; of the dense layer all three products.
    assert whole == pytest.approx(2 * convolution + 3 * product)
    by_compiler = program.cost_analysis()["flops"]
    assert whole == pytest.approx(by_compiler, rel=0.3)  # it leaves out products with padding, and counts tanh


def test_all_time_of_a_real_program_is_accounted_for():
    program, arguments = compile_program()
    program(*arguments)
    activity = trace.profile_device(lambda: [program(*arguments) for _ in range(5)], jax.devices()[0])
    result = budgets.compute_budget(Program(program.as_text()), activity, 5, budgets.Ceilings(1e10, 1e11))
    kinds = {row["kind"]: row for row in result["kinds"]}
    assert budgets.OTHER not in kinds
    assert {"convolution forward", "matrix product"} <= set(kinds)
    assert sum(row["s"] for row in kinds.values()) == pytest.approx(sum(activity.seconds.values()) / 5)
    assert result["whole_s"] >= activity.busy_s / 5
    flops = sum(row["flops"] for kind, row in kinds.items() if kind in CONVOLUTIONS)
    assert flops == pytest.approx(2 * 2 * (4 * 16 * 16 * 16) * (3 * 3 * 8), rel=0.25)  # the profiler may miss its start
    assert result["gap"] in {*kinds, "idle"}
    assert len(budgets.format_rows(result)) == len(kinds) + 1


def test_the_largest_gap_is_to_the_ceiling_that_matters():
    program = Program(CUDNN)
    activity = trace.summarize_events(
        [("cudnn-conv.1", "k", 0.0, 3.0), ("apply", "e", 3.0, 8.0), ("apply", "e", 10.0, 15.0)]
    )
    sizes = {name: program.instructions[name] for name in ("cudnn-conv.1", "apply")}
    ceilings = budgets.Ceilings(sizes["apply"].bytes / 4, sizes["cudnn-conv.1"].flops / 1)
    result = budgets.compute_budget(program, activity, 1, ceilings)
    least = {row["kind"]: row["least_s"] for row in result["kinds"]}
    assert least["normalization"] == pytest.approx(8)
    assert result["idle_s"] == pytest.approx(2)
    assert result["gap_s"] == pytest.approx(2)
    faster = budgets.compute_budget(program, activity, 1, budgets.Ceilings(sizes["apply"].bytes, np.inf))
    assert (faster["gap"], faster["gap_s"]) == ("normalization", pytest.approx(8))
    assert "the largest gap is normalization: 8000.00 ms" in faster["verdict"]


def test_an_empty_trace_is_reported_in_one_sentence():
    with pytest.raises(UserError, match="the profiler recorded no work"):
        trace.summarize_events([])


@pytest.mark.heavy
def test_a_profiled_benchmark_returns_the_budget():
    recipe = load_recipe("digits").override({"model.width": 8})
    result = step.measure_step(
        recipe, pods.make_pod(jax.devices()[:1], "1x1"), Options(), images=32, repeats=1, profile=True
    )
    budget = result["budget"]
    kinds = {row["kind"] for row in budget["kinds"]}
    assert {"convolution forward", "normalization", "optimizer", "reduction"} <= kinds
    assert "measured ceilings: " in budgets.format_verdict(budget)
    assert budget["verdict"] in budgets.format_verdict(budget)
    assert sum(row["s"] for row in budget["kinds"]) > 0.2 * budget["whole_s"]


@pytest.mark.heavy
def test_the_evaluation_step_is_timed_for_the_given_number_of_images():
    pod = pods.make_pod(jax.devices()[:2], "1x2")
    result = step.measure_evaluation(load_recipe("digits"), pod, Options(), images=24, repeats=2)
    assert result["images_per_device"] == 24
    assert len(result["step_ms_all"]) == 2
    assert result["images_per_s"] == pytest.approx(48 / (result["step_ms"] / 1e3))
