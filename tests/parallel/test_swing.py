"""Swing: every chip meets all others once, along the shortest ways, and adds the same numbers in the same order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from podscale.errors import UserError
from podscale.parallel import batch_norm, exchanges
from podscale.parallel.exchanges import Exchange, find_partners, list_messages, list_pairs, make_paths, measure_span
from podscale.parallel.strategies import STRATEGIES, find_summation
from podscale.parallel.summation import Transfer
from podscale.pod import ALL_AXES, TILE

COUNTS = [*range(1, 21), 24, 27, 32, 45, 64]


# --- who sends to whom ---------------------------------------------------------------------------------------------


def test_distances_are_those_of_the_paper():
    """The sum of (-2)^i for i up to s: 1, -1, 3, -5, 11, ... for even chips, the opposite for odd ones."""
    for step, reach in enumerate((1, -1, 3, -5, 11, -21)):
        partners = find_partners(64, step)
        assert partners == [(chip + (reach if chip % 2 == 0 else -reach)) % 64 for chip in range(64)]
        assert [partners[partner] for partner in partners] == list(range(64))


def simulate_halving(pairs, count):
    """Divide data in `count` parts by halving; return which parts each chip owns, and from which chips it has them."""
    parts = [list(range(count)) for _ in range(count)]
    summed = [{part: {chip} for part in range(count)} for chip in range(count)]
    for groups in pairs:
        before = [dict(sums) for sums in summed]
        for first, second in groups:
            half = len(parts[first]) // 2
            assert parts[first] == parts[second]
            for chip, other, mine in ((first, second, parts[first][:half]), (second, first, parts[first][half:])):
                assert not any(before[chip][part] & before[other][part] for part in mine)
                summed[chip] = {part: before[chip][part] | before[other][part] for part in mine}
            parts[first], parts[second] = parts[first][:half], parts[first][half:]
    return parts, summed


@pytest.mark.parametrize("is_mirrored", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32, 64])
def test_halving_leaves_one_finished_part_on_every_chip(count, is_mirrored):
    parts, summed = simulate_halving(list_pairs(count, is_mirrored=is_mirrored), count)
    assert sorted(part for own in parts for part in own) == list(range(count))
    assert all(chips == set(range(count)) for own in summed for chips in own.values())


@pytest.mark.parametrize("is_ring", [True, False])
def test_whole_arrays_are_added_once_and_in_the_same_order_on_all_chips(is_ring):
    for count in COUNTS:
        held = [[f"{chip}"] for chip in range(count)]
        for message in list_messages("row", count, is_ring=is_ring):
            sent = [mine[: message.copies] for mine in held]
            held = [mine + sent[source] for mine, source in zip(held, message.sources, strict=True)]
            if message.orders:
                held = [[f"({'+'.join(mine[i] for i in o)})"] for mine, o in zip(held, message.orders, strict=True)]
        assert len({tuple(sorted(terms)) for terms in held}) == 1 or count == 1
        (term,) = {sort_terms(mine[0]) for mine in held}
        assert sorted(map(int, term.replace("(", "").replace(")", "").split("+"))) == list(range(count))


def sort_terms(text):
    """Return a nested sum with the two terms of each pair in a canonical order: a + b has the bits of b + a."""
    depth, start, terms = 0, 1, []
    if not text.startswith("("):
        return text
    for i, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if (character == "+" and depth == 1) or (character == ")" and depth == 0):
            terms.append(sort_terms(text[start:i]))
            start = i + 1
    return f"({'+'.join(sorted(terms) if len(terms) == 2 else terms)})"


@pytest.mark.parametrize(
    ("count", "messages"), [(1, 0), (2, 1), (3, 2), (4, 2), (6, 3), (8, 3), (12, 4), (15, 6), (16, 4), (32, 5)]
)
def test_whole_arrays_take_a_message_per_doubling(count, messages):
    assert len(list_messages("row", count)) == messages
    assert len(list_messages("row", count, is_ring=False)) == messages


def test_on_a_ring_of_four_no_two_messages_share_a_link_and_all_go_one_link():
    for path in make_paths(4, 4, count=4):
        for step in path[:-1]:
            assert measure_span(step.list_hops(), 4) == (1, 1)
    stages = list(zip(*make_paths(4, 4, count=4), strict=True))[:-1]
    for stage in stages:  # and the four paths use all links at once
        for along in ("row", "column"):
            hops = [hop for step in stage if step.along == along for hop in step.list_hops()]
            assert len(hops) == 8
            assert measure_span(hops, 4) == (1, 1)


@pytest.mark.parametrize(("rows", "cols"), [(3, 4), (2, 8), (6, 10), (1, 1), (9, 1), (16, 16)])
def test_paths_have_stages_of_the_same_sizes(rows, cols):
    sizes = {tuple(route.count_chips(rows, cols) for route in path) for path in make_paths(rows, cols, count=4)}
    assert len(sizes) == 1
    assert np.prod(sizes.pop()[:-1]) == rows * cols


def test_groups_of_an_exchange_cover_every_row_and_column():
    chips = np.arange(24).reshape(2, 3, 4)
    pairs = Exchange("column", groups=((0, 2, 1),)).list_cycles(chips)
    assert sorted(pairs.ravel()) == list(range(24))
    np.testing.assert_array_equal(pairs[1], [1, 9, 5])
    np.testing.assert_array_equal(Exchange("row", groups=((0, 1), (3, 2))).list_cycles(chips)[:2], [[0, 1], [3, 2]])


# --- on devices ----------------------------------------------------------------------------------------------------


def sum_on_mesh(function, x, mesh):
    spec = PartitionSpec(ALL_AXES)
    mapped = jax.shard_map(lambda x: function(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(mapped)(x))


def make_mesh(*sizes):
    """Return a mesh of (slices, tiles down, rows of a tile, tiles across, columns of a tile, cores)."""
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), ALL_AXES)


@pytest.mark.parametrize("strategy", ["swing", "swing_latency"])
def test_eight_in_a_row_hold_the_same_bits(strategy):
    """The first length at which Swing's chips meet others in different orders."""
    x = np.random.default_rng(0).standard_normal((8, 1001)).astype(np.float32)
    total = sum_on_mesh(
        partial(STRATEGIES[strategy].sum_gradients, transfer=Transfer()), x, make_mesh(1, 1, 1, 4, 2, 1)
    )
    assert (total.view(np.int32) == total[0].view(np.int32)).all()
    np.testing.assert_allclose(total[0], x.astype(np.float64).sum(0), atol=1e-5)


def test_whole_arrays_are_rounded_once_per_message_and_added_in_float32():
    """1 + 2**-8 rounds to 1 in bfloat16, and 1 - 2**-7 + 2**-8 is kept until the sum itself is rounded."""
    x = np.repeat(np.array([[1 + 2.0**-8], [-1 + 2.0**-7]], np.float32), 5, axis=1)
    sum_small = partial(STRATEGIES["swing_latency"].sum_gradients, transfer=Transfer("bfloat16"))
    np.testing.assert_array_equal(sum_on_mesh(sum_small, x, make_mesh(1, 1, 1, 1, 2, 1)), np.full((2, 5), 2.0**-7))


@pytest.mark.parametrize("sizes", [(1, 2, 2, 1, 3, 1), (1, 1, 4, 2, 2, 1), (1, 1, 1, 2, 4, 2)])
def test_tiles_sum_by_exchanges_as_by_the_compiler(sizes):
    mesh = make_mesh(*sizes)
    x = np.random.default_rng(0).integers(-99, 99, (mesh.size, 2, 3, 5)).astype(np.float32)
    sums = [
        sum_on_mesh(lambda x, groups=groups: batch_norm.sum_over_tile(x, groups), x, mesh)
        for groups in (batch_norm.Groups(1, TILE), batch_norm.Groups(1, TILE, exchanges=True))
    ]
    np.testing.assert_array_equal(*sums)


def test_the_gradient_of_a_sum_by_exchanges_is_that_of_the_compilers():
    """Fused layers differentiate through the sum."""
    mesh = make_mesh(1, 1, 1, 1, 4, 1)
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)

    def differentiate(x, exchanges):
        groups = batch_norm.Groups(1, TILE, exchanges=exchanges)
        return jax.grad(lambda x: (jnp.arange(1.0, 7) * batch_norm.sum_over_tile(x, groups) ** 2).sum())(x)

    ours, theirs = (sum_on_mesh(partial(differentiate, exchanges=value), x, mesh) for value in (True, False))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


# --- by size -------------------------------------------------------------------------------------------------------


def test_each_bucket_is_summed_by_the_strategy_for_its_bytes():
    """Of buckets of 64 and 4,000 bytes, the first is sent whole and the second in quarters of a ring."""
    tree = {"small": jnp.ones((4, 16)), "large": jnp.ones((4, 1000))}
    strategy = find_summation("swing_latency:1024,ring")
    mapped = jax.shard_map(
        partial(strategy.sum_gradients, transfer=Transfer(bucket_bytes=100)),
        mesh=make_mesh(1, 1, 1, 1, 4, 1),
        in_specs=PartitionSpec(ALL_AXES),
        out_specs=PartitionSpec(ALL_AXES),
        check_vma=False,
    )
    text = jax.jit(mapped).lower(tree).as_text()
    assert text.count("collective_permute") == 2 + 2 * 3
    assert "tensor<1x16xf32>" in text  # sent whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swing:9,torsu", "did you mean torus"),
        ("swing:9,torus:8,xla", "bytes must rise"),
        ("swing:9,torus:10", "the last strategy has none"),
        ("swing:many,torus", "'swing:many' is not NAME:BYTES"),
        ("sharded:9,torus", "'sharded:9' is not NAME:BYTES"),
    ],
)
def test_impossible_lists_by_size_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        find_summation(text)


def test_odd_factors_are_primes():
    for count in COUNTS:
        power, primes = exchanges.factor_odd(count)
        assert power * int(np.prod(primes)) == count
        assert all(prime % divisor for prime in primes for divisor in range(2, prime))
