"""Sums over rings and tori: exact, the same bits everywhere, on any rows x columns."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from podscale.errors import UserError
from podscale.parallel import collectives
from podscale.parallel import summation as summations
from podscale.parallel.collectives import hamiltonian
from podscale.parallel.summation import STRATEGIES, make_buckets, sum_tree
from podscale.pod import ALL_AXES

SHAPES = [(1, 1, 1), (1, 4, 1), (4, 1, 1), (2, 2, 1), (2, 4, 1), (3, 3, 1), (3, 5, 1), (5, 3, 1), (4, 4, 1), (2, 3, 1)]
CORES = [(1, 1, 2), (2, 3, 2), (4, 2, 2), (2, 2, 4), (1, 4, 4), (1, 5, 3)]
RINGS = [name for name in STRATEGIES if name != "xla"]


def slow(*shapes):
    """Shapes that `make test` leaves to `make test-slow`."""
    return [pytest.param(shape, marks=pytest.mark.slow) for shape in shapes]


def pod_mesh(rows, cols, cores=1):
    """Batch-norm tiles of two rows where they fit, so that rings run over split axes."""
    height = 2 if rows % 2 == 0 else 1
    devices = np.array(jax.devices()[: rows * cols * cores])
    return Mesh(devices.reshape(rows // height, height, cols, 1, cores), ALL_AXES)


def summation(shape, **options):
    """A compiled function from a tree with one slice per device to the tree that each device holds after the sum."""
    spec = PartitionSpec(ALL_AXES)

    def body(tree):
        total = sum_tree(jax.tree.map(lambda x: x[0], tree), **options)
        return jax.tree.map(lambda x: x[None], total)

    return jax.jit(jax.shard_map(body, mesh=pod_mesh(*shape), in_specs=spec, out_specs=spec, check_vma=False))


def draw(shape, sizes, kind="normal", seed=0):
    """Arrays of these shapes, one slice per device."""
    rng = np.random.default_rng(seed)
    sampler = rng.standard_normal if kind == "normal" else partial(rng.integers, -1000, 1000)
    return {f"leaf{i}": np.asarray(sampler(size=(np.prod(shape), *size)), np.float32) for i, size in enumerate(sizes)}


def agreed(tree):
    """The tree of one replica, after checking that all hold the same bits."""
    for leaf in jax.tree.leaves(tree):
        bits = np.asarray(leaf).reshape(len(leaf), -1).view(np.uint8)
        assert (bits == bits[0]).all()
    return jax.tree.map(lambda x: np.asarray(x)[0], tree)


UNEVEN = [(1,), (), (7,), (1000,), (3, 5)]


@pytest.mark.parametrize("shape", SHAPES + CORES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_integers_sum_exactly_and_floats_nearly_so(strategy, shape):
    tree = {"whole": draw(shape, UNEVEN, "integers"), "real": draw(shape, UNEVEN)}
    total = agreed(summation(shape, strategy=strategy)(tree))
    for name, x in tree["whole"].items():
        np.testing.assert_array_equal(total["whole"][name], x.sum(0))
    for name, x in tree["real"].items():
        # Adding n numbers one by one errs by at most (n - 1) half units of the sum of their magnitudes.
        bound = (len(x) - 1) * 2.0**-24 * np.abs(x.astype(np.float64)).sum(0)
        assert (np.abs(total["real"][name] - x.astype(np.float64).sum(0)) <= bound).all()


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 4, 1), *slow((2, 3, 2), (3, 3, 1)), (4, 4, 1)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_payload_is_rounded_and_the_same_on_all_replicas(strategy, shape):
    tree = draw(shape, UNEVEN)
    total = agreed(summation(shape, strategy=strategy, payload="bfloat16")(tree))
    for name, x in tree.items():
        bound = len(x) * 2.0**-8 * np.abs(x).sum(0)  # one rounding to 8 bits at each device
        assert (np.abs(total[name] - x.sum(0)) <= bound).all()
        if shape != (1, 1, 2):
            np.testing.assert_array_equal(total[name], total[name].astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("strategy", RINGS)
def test_bfloat16_payload_is_added_in_float32(strategy):
    """1 + 2**-8 is 1 in bfloat16: its last bit is lost on a hop, but not where a hop's -1 is added to it."""
    x = np.full((2, 64), -1, np.float32)
    x[1] = 1 + 2.0**-8
    total = agreed(summation((1, 2, 1), strategy=strategy, payload="bfloat16")({"x": x}))
    np.testing.assert_array_equal(np.sort(total["x"]), [0] * 32 + [2.0**-8] * 32)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_device_returns_the_tree_as_it_is(strategy):
    tree = draw((1, 1, 1), UNEVEN)
    total = agreed(summation((1, 1, 1), strategy=strategy, payload="bfloat16")(tree))
    jax.tree.map(np.testing.assert_array_equal, total, jax.tree.map(lambda x: x[0], tree))


@pytest.mark.parametrize("bucket_bytes", [0, 4, 100, 4000])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_bucket_size_gives_the_same_sum(strategy, bucket_bytes):
    tree = draw((2, 3, 2), UNEVEN, "integers")
    total = agreed(summation((2, 3, 2), strategy=strategy, bucket_bytes=bucket_bytes)(tree))
    jax.tree.map(np.testing.assert_array_equal, total, jax.tree.map(lambda x: x.sum(0), tree))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dtypes_come_back_as_they_went(strategy):
    shape, kinds = (2, 2, 1), ("int32", "float16", "bfloat16", "float32")
    tree = {kind: np.arange(20).reshape(4, 5).astype(kind) for kind in kinds}
    total = agreed(summation(shape, strategy=strategy, payload="bfloat16")(tree))
    for kind in kinds:
        assert total[kind].dtype == kind
        np.testing.assert_array_equal(total[kind].astype(np.float32), [30, 34, 38, 42, 46])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float64_stays_float64(strategy):
    x = np.random.default_rng(0).standard_normal((6, 50))
    with jax.enable_x64(True):
        total = agreed(summation((2, 3, 1), strategy=strategy)({"x": x}))["x"]
    assert total.dtype == np.float64
    np.testing.assert_allclose(total, x.sum(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("payload", summations.PAYLOADS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_and_infinity_stay_where_they_are(strategy, payload):
    x = np.ones((6, 41), np.float32)
    x[2, 3], x[5, 7], x[0, 40] = np.nan, np.inf, -np.inf
    total = agreed(summation((3, 2, 1), strategy=strategy, payload=payload)({"x": x}))["x"]
    np.testing.assert_array_equal(total, x.sum(0))


@pytest.mark.parametrize("shape", [*slow((2, 5, 1), (4, 4, 1)), (3, 4, 1)])
@pytest.mark.parametrize("strategy", RINGS)
def test_loops_give_the_same_bits_as_unrolled_hops(strategy, shape, monkeypatch):
    tree = draw(shape, UNEVEN)
    unrolled = summation(shape, strategy=strategy)(tree)
    monkeypatch.setattr(collectives, "UNROLL", 0)
    looped = summation(shape, strategy=strategy)(tree)
    jax.tree.map(np.testing.assert_array_equal, unrolled, looped)


def test_four_paths_share_their_loops(monkeypatch):
    """Loops cannot overlap, so the four quarters must hop inside the same one."""
    monkeypatch.setattr(collectives, "UNROLL", 0)
    text = summation((4, 4, 1), strategy="torus4").lower(draw((4, 4, 1), [(64,)])).as_text()
    assert text.count("stablehlo.while") == 4  # two stages there, two back


@pytest.mark.parametrize(("strategy", "hops"), [("xla", 0), ("ring", 30), ("ring2", 60), ("torus", 12), ("torus4", 48)])
def test_the_compiled_program_has_as_many_hops_as_the_algorithm(strategy, hops):
    program = summation((4, 4, 1), strategy=strategy).lower(draw((4, 4, 1), UNEVEN)).compile().as_text()
    assert len(re.findall(r" collective-permute(?:-start)?\(", program)) == hops


@pytest.mark.parametrize(
    ("shape", "strategy", "hops"),
    [
        ((2, 2, 4), "torus4", 4),  # one path a core: one message moves all four
        ((2, 2, 4), "ring2", 6),
        ((2, 2, 2), "torus4", 8),
        ((2, 3, 2), "torus4", 12),  # rows first and columns first have messages of their own: (2 + 1) * 2 each
        ((2, 2, 2), "torus", 4),
    ],
)
def test_cores_go_their_own_ways_in_the_same_messages(shape, strategy, hops):
    program = summation(shape, strategy=strategy).lower(draw(shape, UNEVEN)).compile().as_text()
    assert len(re.findall(r" collective-permute(?:-start)?\(", program)) == hops


@pytest.mark.parametrize("strategy", RINGS)
def test_cores_share_the_bytes_of_their_chip(strategy):
    """Of 4096 bytes, a ring of four chips sends quarters; with two cores, each core sends quarters of its half."""
    sent = {}
    for cores in (1, 2):
        text = summation((1, 4, cores), strategy=strategy).lower(draw((1, 4, cores), [(1024,)])).as_text()
        sizes = [int(n) for n in re.findall(r'collective_permute"[^\n]*: \(tensor<(\d+)xf32>\)', text)]
        sent[cores] = sum(sizes)
    assert sent[1] == 2 * 3 * 1024 // 4
    assert sent[2] == sent[1] // 2


@pytest.mark.parametrize("strategy", RINGS)
def test_the_same_sum_has_the_same_bits_every_time(strategy):
    tree = draw((2, 3, 2), UNEVEN)
    once, again = (agreed(summation((2, 3, 2), strategy=strategy)(tree)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, once, again)


@pytest.mark.parametrize(("payload", "width"), [("float32", "f32"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_travels_is_the_payload(strategy, payload, width):
    text = summation((2, 2, 1), strategy=strategy, payload=payload).lower(draw((2, 2, 1), [(64,)])).as_text()
    ends = r'all_reduce".*?\}\)' if strategy == "xla" else r'collective_permute"[^\n]*>'
    assert set(re.findall(ends + r" : \(tensor<\d+x(\w+)>\)", text, re.DOTALL)) == {width}


@pytest.mark.parametrize("rows", range(1, 13))
def test_the_ring_visits_every_chip_once_and_every_hop_is_one_link(rows):
    for cols in range(1, 13):
        walk = np.array(hamiltonian(rows, cols))
        assert {tuple(chip) for chip in walk} == set(np.ndindex(rows, cols))
        assert len(walk) == rows * cols
        if len(walk) > 1:
            away = np.abs(np.roll(walk, -1, axis=0) - walk)
            np.testing.assert_array_equal(np.minimum(away, [rows, cols] - away).sum(1), 1)


def test_buckets_run_from_the_last_leaf_to_the_first():
    leaves = [np.zeros(n, np.float32) for n in (10, 10, 100, 10, 10, 10)]
    assert make_buckets(leaves, 80) == [[5, 4], [3], [2], [1, 0]]
    assert make_buckets(leaves, 0) == [[5, 4, 3, 2, 1, 0]]
    assert make_buckets([], 80) == []


def test_buckets_hold_one_dtype_each():
    leaves = [np.zeros(2, kind) for kind in ("float32", "int32", "float32", "int32")]
    assert make_buckets(leaves, 0) == [[3, 1], [2, 0]]


def test_padding_is_to_whole_tiles_only_where_that_is_cheap():
    assert collectives._padding(1000, 16) == 8
    assert collectives._padding(25_557_032, 16) == -25_557_032 % (16 * 1024)
    assert collectives._padding(0, 16) == 0


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"no gradient summation 'torus5': did you mean torus or torus4\?"):
        sum_tree({}, strategy="torus5")
    with pytest.raises(UserError, match=r"travel as 'bfloat8': did you mean bfloat16 or float32\?"):
        sum_tree({}, strategy="ring", payload="bfloat8")
