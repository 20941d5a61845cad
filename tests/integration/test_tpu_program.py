"""What the TPU compiler makes of each summation and batch-norm tile, read from the optimized program."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.parallel.collectives import gather_parts, scatter_sum
from podscale.parallel.strategies import STRATEGIES
from podscale.planner import compile, topologies
from podscale.pod import ALL_AXES, TILE, parse_pod
from podscale.training import setup

pytestmark = pytest.mark.skipif(bool(topologies.explain_no_compiler(parse_pod("v3:2x2"))), reason=topologies.NO_LIBTPU)
ROWS, COLS, CORES = 4, 4, 2
CHIPS, DEVICES = ROWS * COLS, ROWS * COLS * CORES
SIZE = DEVICES * 4 * 1024  # every chunk is a whole number of 8x128 tiles, so that a gather stays one


def compile_program(body, size=SIZE):
    """Return the optimized program of a function of `size` float32 on every core of a v3:4x4 with tiles of 2x2."""
    mesh = topologies.describe_pod(parse_pod(f"v3:{ROWS}x{COLS}")).mesh((2, 2))

    def call(x):
        return body(x[0])[None]

    mapped = jax.shard_map(call, mesh=mesh, in_specs=P(ALL_AXES), out_specs=P(ALL_AXES), check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((DEVICES, size), jnp.float32)).compile().as_text()


def count_collectives(text):
    """Return how many collectives there are of each (kind, devices of a group)."""
    counts = {}
    for collective in compile.read_collectives(text, DEVICES):
        key = collective.kind, collective.group
        counts[key] = counts.get(key, 0) + collective.count
    return counts


def find_reduction_strategies(text):
    """Return how the compiler does its reductions: (name, colors, phases)."""
    pattern = r'"strategy":"(\w+)".*?Strategy\{colors:(\d+) phases:(\d+)'
    return {(name, int(colors), int(phases)) for name, colors, phases in re.findall(pattern, text)}


def test_compiler_sums_in_both_directions_along_both_dimensions_at_once():
    text = compile_program(STRATEGIES["xla"].sum_small)
    assert count_collectives(text) == {("all-reduce", DEVICES): 1}
    assert find_reduction_strategies(text) == {("UniDirectionNDRingStrategy", 4, 2)}


@pytest.mark.parametrize(
    ("strategy", "hops"),
    [
        ("ring", 2 * (CHIPS - 1)),
        ("ring2", 2 * (CHIPS - 1)),  # one path per core
        ("torus", 2 * (ROWS + COLS - 2)),
        ("torus4", 2 * 2 * (ROWS + COLS - 2)),  # two paths per core
    ],
)
def test_ring_strategies_are_hops_between_a_sum_and_a_gather_on_the_chip(strategy, hops):
    text = compile_program(STRATEGIES[strategy].sum_small)
    synchronizations = 3 if strategy == "torus4" else 0  # where cores wait for each other
    assert count_collectives(text) == {
        ("all-reduce", CORES): 1 + synchronizations,  # a reduce-scatter, which this compiler does as a sum and a slice
        ("all-gather", CORES): 1,
        ("collective-permute", DEVICES): hops,
    }


def test_sharded_update_has_the_hops_of_the_torus():
    text = compile_program(lambda x: gather_parts(scatter_sum(x.reshape(DEVICES, -1))).ravel())
    hops = 2 * (ROWS + COLS - 2)
    assert count_collectives(text) == {
        ("all-reduce", CORES): 1,
        ("all-gather", CORES): 1,
        ("collective-permute", DEVICES): hops,
    }


def test_tile_is_summed_along_one_ring_and_nested_sums_along_two_rings_in_turn():
    """So nesting does not give a tile a two-dimensional method: it makes two messages out of one."""
    flat = compile_program(lambda x: lax.psum(x, TILE))
    assert count_collectives(flat) == {("all-reduce", 2 * 2 * CORES): 1}
    assert find_reduction_strategies(flat) == {("UniDirection1DRingStrategy", 2, 1)}
    nested = compile_program(lambda x: lax.psum(lax.psum(x, ("y", "core")), "x"))
    assert count_collectives(nested) == {("all-reduce", 2 * CORES): 1, ("all-reduce", 2): 1}
    assert find_reduction_strategies(nested) == {("UniDirection1DRingStrategy", 2, 1)}


# --- the whole step ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps():
    """Training steps of a small model with batch norm over tiles, with gradients in one sum and in several."""
    settings = {"model.name": "resnet8", "data.image_size": 32, "model.stem": "small", "batch.size": 512}
    recipe = recipes.override_recipe(
        recipes.load_recipe("resnet50-imagenet-32k"), settings | {"data.lanes": 8, "batch.span": 256}
    )
    texts = {}
    for mib in (0, 2):
        plan = setup.plan_recipe(recipe, parse_pod("v3:2x2"), Options(bucket_mib=mib, steps_per_call=1))
        texts[mib] = compile.compile_program(plan).as_text()
    return texts


def find_schedule(text):
    """Return the positions in the schedule of gradient sums over the pod, and of convolutions."""
    entry = text[text.index("\nENTRY ") :].splitlines()
    large = [
        i
        for i, line in enumerate(entry)
        for collective in compile.read_collectives(line, 8)
        if collective.group == 8 and collective.bytes > 2**20
    ]
    convolutions = [i for i, line in enumerate(entry) if "conv_general_dilated" in line and "fusion(" in line]
    return large, convolutions


def test_bucketed_sum_starts_before_the_backward_pass_ends(steps):
    sums, convolutions = find_schedule(steps[0])
    assert len(sums) == 1
    assert sums[0] > convolutions[-1]
    sums, convolutions = find_schedule(steps[2])
    assert len(sums) > 1
    assert sums[0] < convolutions[-1]


@pytest.mark.parametrize("mib", [0, 2])
def test_batch_norm_is_one_message_forward_and_one_backward_over_its_tile(steps, mib):
    tiles = sum(collective.count for collective in compile.read_collectives(steps[mib], 8) if collective.group == 4)
    assert 9 <= tiles <= 18  # nine batch norms, forward and backward; the compiler joins some


# --- several slices ------------------------------------------------------------------------------------------------


def compile_for_slices(strategy, size):
    """Return the optimized program of a sum of `size` float32 of each chip of two slices of 2x2."""
    mesh = topologies.describe_pod(parse_pod("v5e:2x2*2")).mesh((1, 2))

    def call(x):
        return STRATEGIES[strategy].sum_small(x[0])[None]

    mapped = jax.shard_map(call, mesh=mesh, in_specs=P(ALL_AXES), out_specs=P(ALL_AXES), check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, size), jnp.float32)).compile().as_text()


@pytest.mark.heavy
@pytest.mark.parametrize(("strategy", "messages"), [("xla", 1), ("torus", 2)])
def test_between_slices_the_compiler_sends_what_a_chip_owns_of_its_slices_sum(strategy, messages):
    """A quarter of the data, at once or as the two halves of a ring of two, by the runtime for several slices."""
    size = 32 * 1024
    text = compile_for_slices(strategy, size)
    sent = re.findall(r"= \(f32\[([\d,]+)\][^=]* send\(.*xla_megascale_runtime", text)
    assert [math.prod(map(int, shape.split(","))) for shape in sent] == [size // 4 // messages] * messages
    groups = {c.group for c in compile.read_collectives(text, 8) if c.kind != "collective-permute"}
    assert groups <= {4}, "a collective on the links of a slice names chips of another"
    links = [
        int(n) for pairs in re.findall(r"source_target_pairs=\{([\d,{}]+)\}", text) for n in re.findall(r"\d+", pairs)
    ]
    assert set(links) <= {0, 1, 2, 3}
