"""Gradient summation: exact, the same bits on every replica, for every strategy on any rows x columns."""

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from podscale.errors import UserError
from podscale.models.jaxpr import iterate_equations
from podscale.parallel import collectives, strategies
from podscale.parallel.strategies import list_replicated
from podscale.parallel.summation import PAYLOADS, Transfer, make_buckets
from podscale.pod import ALL_AXES

SHAPES = [(1, 1, 1), (1, 4, 1), (4, 1, 1), (2, 2, 1), (2, 4, 1), (3, 3, 1), (3, 5, 1), (5, 3, 1), (4, 4, 1), (2, 3, 1)]
SLICES = [(2, 2, 1, 2), (1, 1, 1, 2), (1, 2, 1, 3), (2, 2, 2, 2), (3, 1, 1, 2), (2, 2, 1, 4)]  # the last: how many
CORES = [(1, 1, 2), (2, 3, 2), (4, 2, 2), (2, 2, 4), (1, 4, 4), (1, 5, 3)]
STRATEGIES = list_replicated()
RINGS = [name for name in STRATEGIES if name not in ("xla", "swing_latency")]  # what sends parts, not whole arrays
HOPPING = [name for name in STRATEGIES if name != "xla"]


def mark_slow(*shapes):
    """Mark shapes that `make test` leaves to `make test-slow`."""
    return [pytest.param(shape, marks=pytest.mark.slow) for shape in shapes]


def pair_strategies_with_shapes():
    """Return all pairs, of which `make test` runs those where a shape can make a difference.

    A torus has rows and columns: it runs on every shape. Four paths go both ways, so that a shape and its transpose are
    the same to them. A ring only sees how many devices there are, so that the two rings share the shapes, and so do the
    two variants of Swing, whose exchanges have tests of their own (`test_swing.py`). XLA's own sum is the same program
    on every shape of one slice.
    """
    shapes = SHAPES + CORES + SLICES
    in_every_test = {
        "xla": {(1, 1, 1), (2, 3, 2), (2, 2, 1, 2), (1, 2, 1, 3)},
        "ring": set(shapes[::2]),
        "ring2": set(shapes[1::2]),
        "torus4": set(shapes) - {(4, 1, 1), (5, 3, 1)},  # 1x4 and 3x5 remain
        "swing": {(2, 3, 1), (3, 5, 1), (2, 2, 4), (2, 2, 2, 2)},
        "swing_latency": {(5, 3, 1), (2, 3, 2), (1, 2, 1, 3)},
    }
    pairs = [(strategy, shape) for strategy in STRATEGIES for shape in shapes]
    marks = [() if shape in in_every_test.get(name, shapes) else pytest.mark.slow for name, shape in pairs]
    names = [f"{name}-{'x'.join(map(str, shape))}" for name, shape in pairs]
    return [pytest.param(*pair, marks=mark, id=name) for pair, mark, name in zip(pairs, marks, names, strict=True)]


def make_mesh(rows, cols, cores=1, slices=1):
    """Return a mesh with batch-norm tiles of two rows where they fit, so that rings run over split axes."""
    height = 2 if rows % 2 == 0 else 1
    devices = np.array(jax.devices()[: slices * rows * cols * cores])
    return Mesh(devices.reshape(slices, rows // height, height, cols, 1, cores), ALL_AXES)


def sum_tree(tree, strategy, **transfer):
    return strategies.STRATEGIES[strategy].sum_gradients(tree, Transfer(**transfer))


def make_summation(shape, **options):
    """Return a compiled function from a tree with one slice per device to the tree each device holds after the sum."""
    spec = PartitionSpec(ALL_AXES)

    def body(tree):
        total = sum_tree(jax.tree.map(lambda x: x[0], tree), **options)
        return jax.tree.map(lambda x: x[None], total)

    return jax.jit(jax.shard_map(body, mesh=make_mesh(*shape), in_specs=spec, out_specs=spec, check_vma=False))


def sample_tree(shape, sizes, kind="normal", seed=0):
    """Return random arrays of these shapes, with one slice per device."""
    rng = np.random.default_rng(seed)
    sampler = rng.standard_normal if kind == "normal" else partial(rng.integers, -1000, 1000)
    return {f"leaf{i}": np.asarray(sampler(size=(np.prod(shape), *size)), np.float32) for i, size in enumerate(sizes)}


def check_replicas(tree):
    """Return the tree of one replica, after checking that all hold the same bits."""
    for leaf in jax.tree.leaves(tree):
        bits = np.asarray(leaf).reshape(len(leaf), -1).view(np.uint8)
        assert (bits == bits[0]).all()
    return jax.tree.map(lambda x: np.asarray(x)[0], tree)


UNEVEN = [(1,), (), (7,), (1000,), (3, 5)]


@pytest.mark.sample(10)
@pytest.mark.parametrize(("strategy", "shape"), pair_strategies_with_shapes())
def test_integers_sum_exactly_and_floats_within_the_rounding_bound(strategy, shape):
    call = make_summation(shape, strategy=strategy)
    tree = sample_tree(shape, UNEVEN, "integers")
    jax.tree.map(np.testing.assert_array_equal, check_replicas(call(tree)), jax.tree.map(lambda x: x.sum(0), tree))
    tree = sample_tree(shape, UNEVEN)
    total = check_replicas(call(tree))
    for name, x in tree.items():
        # Adding n numbers one by one is off by at most (n - 1) half units of the sum of their magnitudes.
        bound = (len(x) - 1) * 2.0**-24 * np.abs(x.astype(np.float64)).sum(0)
        assert (np.abs(total[name] - x.astype(np.float64).sum(0)) <= bound).all()


@pytest.mark.sample(5)
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 4, 1), *mark_slow((2, 3, 2), (3, 3, 1)), (4, 4, 1), (2, 2, 1, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_payload_is_rounded_and_identical_on_all_replicas(strategy, shape):
    tree = sample_tree(shape, UNEVEN)
    total = check_replicas(make_summation(shape, strategy=strategy, payload="bfloat16")(tree))
    for name, x in tree.items():
        bound = len(x) * 2.0**-8 * np.abs(x).sum(0)  # one rounding to 8 bits at each device
        assert (np.abs(total[name] - x.sum(0)) <= bound).all()
        if shape != (1, 1, 2):
            np.testing.assert_array_equal(total[name], total[name].astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", RINGS)
def test_bfloat16_payload_is_added_in_float32(strategy):
    """1 + 2**-8 rounds to 1 in bfloat16: a hop loses the last bit, adding the -1 of a hop to it does not."""
    x = np.full((2, 64), -1, np.float32)
    x[1] = 1 + 2.0**-8
    total = check_replicas(make_summation((1, 2, 1), strategy=strategy, payload="bfloat16")({"x": x}))
    np.testing.assert_array_equal(np.sort(total["x"]), [0] * 32 + [2.0**-8] * 32)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_device_returns_the_tree_unchanged(strategy):
    tree = sample_tree((1, 1, 1), UNEVEN)
    total = check_replicas(make_summation((1, 1, 1), strategy=strategy, payload="bfloat16")(tree))
    jax.tree.map(np.testing.assert_array_equal, total, jax.tree.map(lambda x: x[0], tree))


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("strategy", "bucket_bytes"),
    [
        pytest.param(strategy, size, marks=() if strategy == "torus4" or size == 100 else pytest.mark.slow)
        for strategy in STRATEGIES
        for size in (0, 4, 100, 4000)
    ],
)
def test_any_bucket_size_gives_the_same_sum(strategy, bucket_bytes):
    tree = sample_tree((2, 3, 2), UNEVEN, "integers")
    total = check_replicas(make_summation((2, 3, 2), strategy=strategy, bucket_bytes=bucket_bytes)(tree))
    jax.tree.map(np.testing.assert_array_equal, total, jax.tree.map(lambda x: x.sum(0), tree))


@pytest.mark.sample(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dtypes_are_preserved(strategy):
    shape, kinds = (2, 2, 1), ("int32", "float16", "bfloat16", "float32")
    tree = {kind: np.arange(20).reshape(4, 5).astype(kind) for kind in kinds}
    total = check_replicas(make_summation(shape, strategy=strategy, payload="bfloat16")(tree))
    for kind in kinds:
        assert total[kind].dtype == kind
        np.testing.assert_array_equal(total[kind].astype(np.float32), [30, 34, 38, 42, 46])


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float64_sums_stay_float64(strategy):
    x = np.random.default_rng(0).standard_normal((6, 50))
    with jax.enable_x64(True):
        total = check_replicas(make_summation((2, 3, 1), strategy=strategy)({"x": x}))["x"]
    assert total.dtype == np.float64
    np.testing.assert_allclose(total, x.sum(0), rtol=0, atol=1e-14)


@pytest.mark.sample(4)
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_and_infinity_stay_in_their_elements(strategy, payload):
    x = np.ones((6, 41), np.float32)
    x[2, 3], x[5, 7], x[0, 40] = np.nan, np.inf, -np.inf
    total = check_replicas(make_summation((3, 2, 1), strategy=strategy, payload=payload)({"x": x}))["x"]
    np.testing.assert_array_equal(total, x.sum(0))


@pytest.mark.heavy
@pytest.mark.parametrize("shape", [*mark_slow((2, 5, 1), (4, 4, 1)), (3, 4, 1)])
@pytest.mark.parametrize("strategy", [name for name in RINGS if name != "swing"])
def test_loops_give_the_same_bits_as_unrolled_hops(strategy, shape, monkeypatch):
    tree = sample_tree(shape, UNEVEN)
    unrolled = make_summation(shape, strategy=strategy)(tree)
    monkeypatch.setattr(collectives, "MAX_UNROLLED_HOPS", 0)
    looped = make_summation(shape, strategy=strategy)(tree)
    jax.tree.map(np.testing.assert_array_equal, unrolled, looped)


def test_four_paths_share_their_loops(monkeypatch):
    """Loops cannot overlap, so the four quarters must hop inside the same loop."""
    monkeypatch.setattr(collectives, "MAX_UNROLLED_HOPS", 0)
    text = make_summation((4, 4, 1), strategy="torus4").lower(sample_tree((4, 4, 1), [(64,)])).as_text()
    assert text.count("stablehlo.while") == 4  # two reduce-scatter stages and two all-gather stages


@pytest.mark.parametrize(
    ("strategy", "hops"),
    [("xla", 0), ("ring", 30), ("ring2", 60), ("torus", 12), ("torus4", 48), ("swing", 8), ("swing_latency", 4)],
)
def test_compiled_program_has_the_hops_of_the_algorithm(strategy, hops):
    program = make_summation((4, 4, 1), strategy=strategy).lower(sample_tree((4, 4, 1), UNEVEN)).compile().as_text()
    assert len(re.findall(r" collective-permute(?:-start)?\(", program)) == hops


@pytest.mark.parametrize(
    ("shape", "strategy", "hops"),
    [
        ((2, 2, 4), "torus4", 4),  # one path per core: one message moves all four
        ((2, 2, 4), "ring2", 6),
        ((2, 2, 2), "torus4", 8),
        ((2, 3, 2), "torus4", 12),  # rows first and columns first need separate messages: (2 + 1) * 2 each
        ((1, 4, 4), "torus4", 12),  # the same, but each core takes part in those of its own path
        ((2, 2, 2), "torus", 4),
        ((2, 3, 2), "swing", 6),  # lanes of Swing have messages of one shape on any torus: (2 + 1) * 2
    ],
)
def test_cores_follow_their_own_paths_in_the_same_messages(shape, strategy, hops):
    program = make_summation(shape, strategy=strategy).lower(sample_tree(shape, UNEVEN)).compile().as_text()
    assert len(re.findall(r" collective-permute(?:-start)?\(", program)) == hops


def test_cores_wait_only_for_messages_of_their_own_path():
    """Rows-first parts are those of two cores and columns-first parts those of the others, so both move at once."""
    shape = (1, 4, 4)
    text = make_summation(shape, strategy="torus4").lower(sample_tree(shape, [(64,)])).as_text()
    pairs = re.findall(r"collective_permute\"[^\n]*source_target_pairs = dense<(\[\[.*?\]\])>", text)
    cores = [{device % 4 for device in np.ravel(json.loads(text))} for text in pairs]
    assert len(cores) == 12
    assert all(used in ({0, 1}, {2, 3}) for used in cores)


@pytest.mark.parametrize("strategy", RINGS)
def test_cores_share_the_bytes_of_their_chip(strategy):
    """Of 4096 bytes, a ring of four chips sends quarters; with two cores, each core sends quarters of its half."""
    sent = {}
    for cores in (1, 2):
        text = make_summation((1, 4, cores), strategy=strategy).lower(sample_tree((1, 4, cores), [(1024,)])).as_text()
        sizes = [int(n) for n in re.findall(r'collective_permute"[^\n]*: \(tensor<(\d+)xf32>\)', text)]
        sent[cores] = sum(sizes)
    assert sent[1] == 2 * 3 * 1024 // 4
    assert sent[2] == sent[1] // 2


@pytest.mark.parametrize("strategy", RINGS)
def test_between_slices_travels_only_what_a_chip_owns_of_the_sum_of_its_slice(strategy):
    """Two slices of 2x2: of 4096 bytes, each chip owns a quarter, and half of that goes each way of the ring of two."""
    call = make_summation((2, 2, 1, 2), strategy=strategy)
    equations = iterate_equations(jax.make_jaxpr(call)(sample_tree((2, 2, 1, 2), [(1024,)])).jaxpr)
    crossing = 0
    for equation in equations:
        if equation.primitive.name == "ppermute":
            crosses = {source // 4 != target // 4 for source, target in equation.params["perm"]}
            assert len(crosses) == 1, "a ring within slices crosses from one to the other"
            crossing += crosses.pop() * equation.invars[0].aval.size
    assert crossing == 1024 // 4  # a half there, and a half back


def test_the_compiler_sums_within_slices_and_then_between_them():
    call = make_summation((2, 2, 1, 2), strategy="xla")
    equations = iterate_equations(jax.make_jaxpr(call)(sample_tree((2, 2, 1, 2), [(1024,)])).jaxpr)
    sums = [e for e in equations if e.primitive.name.startswith("psum") and "slice" in e.params.get("axes", ())]
    assert [(e.params["axes"], e.invars[0].aval.size) for e in sums] == [(("slice",), 1024 // 4)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", HOPPING)
def test_repeated_sums_have_the_same_bits(strategy):
    tree = sample_tree((2, 3, 2), UNEVEN)
    first, second = (check_replicas(make_summation((2, 3, 2), strategy=strategy)(tree)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(("payload", "width"), [("float32", "f32"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_messages_have_the_payload_dtype(strategy, payload, width):
    text = (
        make_summation((2, 2, 1), strategy=strategy, payload=payload).lower(sample_tree((2, 2, 1), [(64,)])).as_text()
    )
    ends = r'all_reduce".*?\}\)' if strategy == "xla" else r'collective_permute"[^\n]*>'
    assert set(re.findall(ends + r" : \(tensor<(?:\d+x)+(\w+)>\)", text, re.DOTALL)) == {width}


def test_buckets_run_from_the_last_leaf_to_the_first():
    leaves = [np.zeros(n, np.float32) for n in (10, 10, 100, 10, 10, 10)]
    assert make_buckets(leaves, 80) == [[5, 4], [3], [2], [1, 0]]
    assert make_buckets(leaves, 0) == [[5, 4, 3, 2, 1, 0]]
    assert make_buckets([], 80) == []


def test_buckets_hold_one_dtype_each():
    leaves = [np.zeros(2, kind) for kind in ("float32", "int32", "float32", "int32")]
    assert make_buckets(leaves, 0) == [[3, 1], [2, 0]]


def test_unknown_strategies_and_payloads_are_refused_with_the_nearest_names():
    with pytest.raises(UserError, match=r"no gradient summation 'torus5': did you mean torus or torus4\?"):
        sum_tree({}, strategy="torus5")
    with pytest.raises(UserError, match=r"travel as 'bfloat8': did you mean bfloat16 or float32\?"):
        sum_tree({}, strategy="ring", payload="bfloat8")
