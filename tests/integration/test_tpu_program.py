"""What the TPU compiler makes of each summation and batch-norm tile: its own word, read from the optimized program."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.parallel.collectives import gather_parts, scatter_sum
from podscale.parallel.summation import sum_tree
from podscale.planner import compile, described_devices
from podscale.pod import ALL_AXES, TILE, named
from podscale.training import setup

pytestmark = pytest.mark.skipif(bool(described_devices.why_not(named("v3:2x2"))), reason=described_devices.NO_LIBTPU)
ROWS, COLS, CORES = 4, 4, 2
CHIPS, DEVICES = ROWS * COLS, ROWS * COLS * CORES
SIZE = DEVICES * 4 * 1024  # every shard a whole number of 8x128 tiles: so a gather stays one


def program(body, size=SIZE):
    """The optimized program of a function of `size` float32 on every core of a v3:4x4 with tiles of 2x2."""
    mesh = described_devices.pod(named(f"v3:{ROWS}x{COLS}")).mesh((2, 2))

    def call(x):
        return body(x[0])[None]

    mapped = jax.shard_map(call, mesh=mesh, in_specs=P(ALL_AXES), out_specs=P(ALL_AXES), check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((DEVICES, size), jnp.float32)).compile().as_text()


def found(text):
    """(kind, devices of a group): how many there are."""
    counts = {}
    for one in compile.collectives(text, DEVICES):
        counts[one.kind, one.group] = counts.get((one.kind, one.group), 0) + one.count
    return counts


def methods(text):
    """How the compiler does its reductions: (name, colours, phases)."""
    pattern = r'"strategy":"(\w+)".*?Strategy\{colors:(\d+) phases:(\d+)'
    return {(name, int(colours), int(phases)) for name, colours, phases in re.findall(pattern, text)}


def test_the_compilers_own_sum_goes_both_ways_along_both_dimensions_at_once():
    text = program(lambda x: sum_tree(x, strategy="xla"))
    assert found(text) == {("all-reduce", DEVICES): 1}
    assert methods(text) == {("UniDirectionNDRingStrategy", 4, 2)}


@pytest.mark.parametrize(
    ("strategy", "hops"),
    [
        ("ring", 2 * (CHIPS - 1)),
        ("ring2", 2 * (CHIPS - 1)),  # a path a core
        ("torus", 2 * (ROWS + COLS - 2)),
        ("torus4", 2 * 2 * (ROWS + COLS - 2)),  # two paths a core
    ],
)
def test_a_strategy_of_rings_is_its_hops_between_a_sum_and_a_gather_on_the_chip(strategy, hops):
    text = program(lambda x: sum_tree(x, strategy=strategy))
    turns = 3 if strategy == "torus4" else 0  # where cores wait for each other
    assert found(text) == {
        ("all-reduce", CORES): 1 + turns,  # a reduce-scatter, which this compiler does as a sum and a slice
        ("all-gather", CORES): 1,
        ("collective-permute", DEVICES): hops,
    }


def test_the_halves_of_a_sharded_update_hop_like_the_torus():
    text = program(lambda x: gather_parts(scatter_sum(x.reshape(DEVICES, -1))).ravel())
    hops = 2 * (ROWS + COLS - 2)
    assert found(text) == {("all-reduce", CORES): 1, ("all-gather", CORES): 1, ("collective-permute", DEVICES): hops}


def test_a_tile_is_summed_round_one_ring_and_nested_sums_are_two_rings_one_after_the_other():
    """So nesting gives a tile no method of two dimensions: it makes two messages out of one."""
    at_once = program(lambda x: lax.psum(x, TILE))
    assert found(at_once) == {("all-reduce", 2 * 2 * CORES): 1}
    assert methods(at_once) == {("UniDirection1DRingStrategy", 2, 1)}
    nested = program(lambda x: lax.psum(lax.psum(x, ("y", "core")), "x"))
    assert found(nested) == {("all-reduce", 2 * CORES): 1, ("all-reduce", 2): 1}
    assert methods(nested) == {("UniDirection1DRingStrategy", 2, 1)}


# --- the whole step ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps():
    """The training step of a small model with batch norm over tiles, its gradients in one sum and in several."""
    settings = {"model.name": "resnet8", "data.image_size": 32, "model.stem": "small", "batch.size": 512}
    recipe = recipes.override(recipes.load("resnet50-imagenet-32k"), settings | {"data.lanes": 8, "batch.span": 256})
    texts = {}
    for mib in (0, 2):
        plan = setup.plan_recipe(recipe, named("v3:2x2"), Options(bucket_mib=mib, steps_per_call=1))
        texts[mib] = compile._compiled(replace(plan, pod=described_devices.pod(plan.pod))).as_text()
    return texts


def order(text):
    """Places in the schedule of the gradients' sums over the pod, and of convolutions."""
    entry = text[text.index("\nENTRY ") :].splitlines()
    large = [
        i
        for i, line in enumerate(entry)
        for one in compile.collectives(line, 8)
        if one.group == 8 and one.bytes > 2**20
    ]
    convolutions = [i for i, line in enumerate(entry) if "conv_general_dilated" in line and "fusion(" in line]
    return large, convolutions


def test_a_sum_in_buckets_begins_before_the_backward_pass_has_ended(steps):
    sums, convolutions = order(steps[0])
    assert len(sums) == 1
    assert sums[0] > convolutions[-1]
    sums, convolutions = order(steps[2])
    assert len(sums) > 1
    assert sums[0] < convolutions[-1]


@pytest.mark.parametrize("mib", [0, 2])
def test_a_batch_norm_is_one_message_each_way_over_its_tile(steps, mib):
    tiles = sum(one.count for one in compile.collectives(steps[mib], 8) if one.group == 4)
    assert 9 <= tiles <= 18  # nine batch norms, forward and backward; the compiler joins some
