"""The closed forms of `forecast.network` against a simulation that sends every message over its own link."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.errors import UserError
from podscale.forecast import network
from podscale.forecast.chips import get_chip, list_kinds
from podscale.forecast.network import Axis
from podscale.parallel.exchanges import list_messages, make_paths
from podscale.parallel.routes import PATHS, find_hamiltonian_cycle
from podscale.parallel.strategies import STRATEGIES
from podscale.parallel.summation import Load
from podscale.pod import CHIPS, parse_pod

RATE, HOP = 70e9, 1e-6


class Torus:
    """Chips as rows x columns. A link leads from a chip in one of four directions and carries one message at a time."""

    def __init__(self, rows, cols):
        self.rows, self.cols, self.clock = rows, cols, 0.0

    def round(self, messages):
        """Send all messages (chip, direction, bytes) at once; the next round starts when the last one has arrived."""
        links = [(chip, direction) for chip, direction, _ in messages]
        assert len(set(links)) == len(links), "a link is used twice at once"
        if messages:
            self.clock += max(HOP + size / RATE for *_, size in messages)


class Path:
    """A part of the data on its way along rings: (row ring or column ring, direction) in sequence."""

    def __init__(self, torus, size, rings):
        self.torus, self.size, self.rings = torus, size, rings

    def length(self, stage):
        along, _ = self.rings[stage]
        return self.torus.cols if along == "row" else self.torus.rows

    def message(self, stage):
        size = self.size
        for earlier in range(stage + 1):
            size /= self.length(earlier)
        return size

    def hop(self, stage, number):
        """Return every chip's message of one hop; none once the round is complete."""
        if number >= self.length(stage) - 1:
            return []
        chips = [(r, c) for r in range(self.torus.rows) for c in range(self.torus.cols)]
        return [(place, self.rings[stage], self.message(stage)) for place in chips]


def simulate_paths(rows, cols, size, rings):
    """Scatter along each path's rings in turn, with synchronized hops, then gather along them in reverse."""
    torus = Torus(rows, cols)
    paths = [Path(torus, size / len(rings), path_rings) for path_rings in rings]
    stages = list(range(len(rings[0])))
    for stage in stages + stages[::-1]:
        for number in range(max(path.length(stage) for path in paths) - 1):
            torus.round([message for path in paths for message in path.hop(stage, number)])
    return torus.clock


def simulate_ring(rows, cols, size, directions):
    """Send along the ring through all chips; each hop must be a link of the torus, in either direction."""
    torus, walk = Torus(rows, cols), find_hamiltonian_cycle(rows, cols)
    count, moves = len(walk), []
    for direction in directions:
        for index, (a, b) in enumerate(zip(walk, walk[1:] + walk[:1], strict=True)):
            here, there = (a, b) if direction == 1 else (b, a)
            step = ((there[0] - here[0]) % rows, (there[1] - here[1]) % cols)
            assert step in {(0, 1 % cols), (0, -1 % cols), (1 % rows, 0), (-1 % rows, 0)}
            # Between the chips of a ring of two there are two links; the walk may use either.
            two = (rows == 2 and step[0]) or (cols == 2 and step[1])
            moves.append((here, (step, direction, index) if two else step, size / len(directions) / count))
    torus.round(moves)  # every round is like the first
    return torus.clock * 2 * (count - 1)


ROWS = ("row", 1), ("column", 1)
FOUR = [
    (("row", 1), ("column", 1)),
    (("row", -1), ("column", -1)),
    (("column", 1), ("row", 1)),
    (("column", -1), ("row", -1)),
]


def time_strategy(name):
    """Return a function from axes and bytes to the seconds that a strategy's paths take on them."""

    def form(axes, size):
        one_slice = Axis(1, RATE, HOP)
        along = {"row": axes[0], "column": axes[1], "all": network._join_axes(axes), "slice": one_slice}
        return network.time_paths([[along[route.along] for route in path] for path in PATHS[name]], size)

    return form


SHAPES = [(1, 2), (2, 2), (2, 3), (3, 3), (4, 4), (4, 8), (8, 4), (16, 16), (16, 32), (32, 32)]


def make_axes(rows, cols, rate=RATE, hop=HOP):
    return Axis(cols, rate, hop), Axis(rows, rate, hop)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("size", [512.0, 102e6])
def test_a_torus_sum_takes_as_long_as_its_messages(rows, cols, size):
    assert time_strategy("torus")(make_axes(rows, cols), size) == pytest.approx(
        simulate_paths(rows, cols, size, [ROWS]), rel=1e-9
    )


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("size", [512.0, 102e6])
def test_four_paths_use_no_link_twice_and_take_as_long_as_their_messages(rows, cols, size):
    assert time_strategy("torus4")(make_axes(rows, cols), size) == pytest.approx(
        simulate_paths(rows, cols, size, FOUR), rel=1e-9
    )


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize(("directions", "form"), [((1,), time_strategy("ring")), ((1, -1), time_strategy("ring2"))])
def test_a_ring_sum_takes_as_long_as_its_messages(rows, cols, directions, form):
    assert form(make_axes(rows, cols), 1e6) == pytest.approx(simulate_ring(rows, cols, 1e6, directions), rel=1e-9)


# --- Swing -----------------------------------------------------------------------------------------------------------


def walk_ring(start, end, length):
    """Return the directed links from one chip of a ring to another: the shorter way, forwards if both are as short."""
    forwards = (end - start) % length
    if 2 * forwards <= length:
        return [((start + i) % length, 1) for i in range(forwards)]
    return [((start - i) % length, -1) for i in range(length - forwards)]


def simulate_round(messages, rows, cols):
    """Return the seconds of messages (chip, chip, bytes) that start at once, each along its row or its column.

    A message is done when all links on its way have carried all messages that cross them, and it has passed each.
    """
    carried, ways = Counter(), []
    for (row, col), (to_row, to_col), size in messages:
        assert (row == to_row) != (col == to_col)
        if row == to_row:
            way = [(row, link, "across") for link in walk_ring(col, to_col, cols)]
        else:
            way = [(col, link, "down") for link in walk_ring(row, to_row, rows)]
        carried.update(dict.fromkeys(way, 0))
        for link in way:
            carried[link] += size
        ways.append(way)
    return max(len(way) * HOP for way in ways) + max(carried.values()) / RATE


def simulate_swing(rows, cols, count, size):
    """Halve along every cycle of the paths, on chips numbered in row order, and gather in reverse."""
    paths, part, seconds = make_paths(rows, cols, count), size / count, 0.0
    chips = np.arange(rows * cols).reshape(1, rows, cols)
    for stage in list(zip(*paths, strict=True))[:-1]:
        cycles = [cycle for route in stage for cycle in route.list_cycles(chips).tolist()]
        part /= len(cycles[0])
        places = [[divmod(chip, cols) for chip in cycle] for cycle in cycles]
        hops = [(here, there, part) for c in places for here, there in zip(c, c[1:] + c[:1], strict=True)]
        seconds += (len(cycles[0]) - 1) * simulate_round(hops, rows, cols)
    return 2 * seconds


def simulate_messages(rows, cols, size):
    """Send whole arrays along rows, then along columns."""
    seconds = 0.0
    for message in list_messages("row", cols):
        sent = [((r, s), (r, t), message.copies * size) for r in range(rows) for t, s in enumerate(message.sources)]
        seconds += simulate_round(sent, rows, cols)
    for message in list_messages("column", rows):
        sent = [((s, c), (t, c), message.copies * size) for c in range(cols) for t, s in enumerate(message.sources)]
        seconds += simulate_round(sent, rows, cols)
    return seconds


def make_torus(rows, cols):
    """Return the axes of a torus on which each further link of a message costs as much as the first."""
    return {"row": Axis(cols, RATE, HOP, HOP), "column": Axis(rows, RATE, HOP, HOP), "slice": Axis(1, RATE, HOP)}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("rows", "cols"), [(1, 2), (4, 4), (3, 4), (2, 8), (6, 5), (16, 8), (32, 32)])
@pytest.mark.parametrize("size", [512.0, 102e6])
def test_swing_takes_as_long_as_its_messages(rows, cols, count, size):
    seconds, expected = network.time_swing(make_torus(rows, cols), count, size), simulate_swing(rows, cols, count, size)
    if count == 1 or rows == cols:
        assert seconds == pytest.approx(expected, rel=1e-9)
    else:  # of paths along rows and along columns at once, the model takes the slower, and the longest way of all
        assert seconds == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("rows", "cols"), [(1, 2), (4, 4), (3, 4), (2, 8), (6, 5), (16, 8), (32, 32)])
def test_whole_arrays_take_as_long_as_their_messages(rows, cols):
    for size in (512.0, 1e6):
        expected = simulate_messages(rows, cols, size)
        assert network.time_messages(make_torus(rows, cols), size) == pytest.approx(expected, rel=1e-9)


def test_swing_has_half_of_the_latency_of_a_torus_and_its_rate_where_no_link_is_shared():
    small, large = ([form(size) for form in make_forms(4, 4)] for size in (1.0, 1e9))
    assert small == pytest.approx([12 * HOP, 8 * HOP, 4 * HOP], rel=1e-3)
    assert large == pytest.approx([2 * 15 / 16 * 1e9 / RATE] * 2 + [4 * 1e9 / RATE], rel=1e-3)


def make_forms(rows, cols):
    """Return the times of `torus`, `swing` and `swing_latency` as functions of the bytes."""
    return (
        lambda size: time_strategy("torus")(make_axes(rows, cols), size),
        lambda size: network.time_swing(make_torus(rows, cols), 1, size),
        lambda size: network.time_messages(make_torus(rows, cols), size),
    )


def test_pairs_that_take_turns_are_slower_than_rings():
    axes = {name: replace(axis, pair_rate=RATE / 2) for name, axis in make_torus(3, 4).items()}
    free = make_torus(3, 4)
    assert network.time_messages(axes, 1e9) == pytest.approx((2 * 2 + 2) * 1e9 / RATE, rel=1e-3)  # two pairs, a block
    assert network.time_messages(free, 1e9) == pytest.approx((2 + 2) * 1e9 / RATE, rel=1e-3)


@pytest.mark.parametrize(("rows", "cols"), [(4, 4), (32, 32)])
def test_independent_paths_take_as_long_as_all_links_on_a_square_torus(rows, cols):
    square = make_axes(rows, cols)
    assert network.time_independent_paths(square, 1e8) == pytest.approx(time_strategy("torus4")(square, 1e8))


def test_the_compilers_sum_of_a_third_dimension_uses_six_links():
    flat, deep = (Axis(16, RATE, 0.0),) * 2, (Axis(16, RATE, 0.0),) * 3
    assert network.time_independent_paths(deep, 1e9) == pytest.approx(
        network.time_independent_paths(flat, 1e9) * 2 / 3, rel=0.01
    )


# --- properties that hold for all numbers --------------------------------------------------------------------------

FORMS = [*map(time_strategy, PATHS), network.time_independent_paths]
sizes = st.integers(1, 40)


@given(rows=sizes, cols=sizes, size=st.floats(1, 1e9), rate=st.floats(1e6, 1e12), more=st.floats(1, 100))
@settings(max_examples=60, deadline=None)
def test_faster_links_and_less_data_never_take_longer(rows, cols, size, rate, more):
    for form in FORMS:
        seconds = form(make_axes(rows, cols, rate), size)
        assert form(make_axes(rows, cols, rate * more), size) <= seconds * (1 + 1e-12)
        assert form(make_axes(rows, cols, rate), size / more) <= seconds * (1 + 1e-12)
        assert form(make_axes(rows, cols, rate, HOP / more), size) <= seconds * (1 + 1e-12)


@given(rows=sizes, cols=sizes, size=st.floats(1, 1e9))
@settings(max_examples=60, deadline=None)
def test_no_sum_is_faster_than_its_bytes_through_all_links(rows, cols, size):
    chips = rows * cols
    least = 2 * size * (chips - 1) / chips / (4 * RATE)
    for form in FORMS:
        assert form(make_axes(rows, cols, hop=0.0), size) >= least * (1 - 1e-9)


@pytest.mark.parametrize("kind", list_kinds())
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_pod_sums_in_positive_time(kind, strategy):
    for shape in ("1x1", "1x8", "4x8", "128x8"):
        seconds = STRATEGIES[strategy].predict_s(network.PodLinks(parse_pod(f"{kind}:{shape}")), Load(1e8))
        assert seconds > 0 or (shape == "1x1" and get_chip(kind).cores == 1)


def test_a_tile_of_one_device_sends_nothing_and_a_larger_one_takes_longer():
    pod = parse_pod("v4:8x8")
    times = [network.predict_group_s(pod, tile, 4096) for tile in ((1, 1), (1, 2), (2, 2), (4, 4))]
    assert times[0] == 0
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("name", "closed"),
    [("v3:32x32", (True, True)), ("v3:16x32", (True, False)), ("v4:4x4x8", (True,) * 3), ("v5e:8x8", (False,) * 2)],
)
def test_directions_share_the_links_of_rings_that_do_not_close(name, closed):
    pod, rate = parse_pod(name), get_chip(name.partition(":")[0]).link_rate
    assert [axis.rate for axis in network.make_axes(pod)] == [rate] * len(closed)
    assert [axis.rate for axis in network.make_axes(pod, both_ways=True)] == [rate if c else rate / 2 for c in closed]


@pytest.mark.parametrize(("name", "most"), [("v4:8x8", 8192), ("v3:8x8", 4096)])
def test_small_sums_over_a_tile_go_round_once_and_larger_ones_twice(name, most):
    pod, row = parse_pod(name), get_chip(name[:2])
    start = row.start_s + (pod.cores > 1) * row.hop_s
    assert network.predict_group_s(pod, (2, 4), most) == pytest.approx(start + 7 * (row.hop_s + most / row.link_rate))
    hop = row.hop_s + (most + 8) / 8 / row.link_rate
    assert network.predict_group_s(pod, (2, 4), most + 8) == pytest.approx(start + 14 * hop)


@pytest.mark.parametrize(("size", "rate", "hop"), [(0, 1.0, 0.0), (-1, 1.0, 0.0), (4, 0.0, 0.0), (4, 1.0, -1.0)])
def test_an_impossible_axis_is_refused(size, rate, hop):
    with pytest.raises(UserError, match="is impossible"):
        Axis(size, rate, hop)


def test_every_chip_kind_but_the_cpu_has_a_row():
    assert set(list_kinds()) == set(CHIPS) - {"cpu"}
    for kind in list_kinds():
        row = get_chip(kind)
        assert (row.cores, row.chips_per_host) == CHIPS[kind][:2]
        assert row.memory_bytes // row.cores == CHIPS[kind][2]
        assert len(row.source) > 40


# --- several slices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["xla", "ring", "ring2", "torus", "torus4", "swing", "sharded"])
def test_between_slices_each_chip_sends_what_it_owns_of_its_slice(name):
    """The sum over four slices takes as long as in one, and then as the ring or tree of 1/256 between four."""
    size, chip = 102e6, get_chip("v5e")
    load = Load(size, parameters=size)
    one, four = (STRATEGIES[name].predict_s(network.PodLinks(parse_pod(f"v5e:16x16{end}")), load) for end in ("", "*4"))
    share = size / 256
    ring = 2 * 3 * (chip.slice_hop_s + share / 4 / chip.slice_rate)
    paths = len(PATHS.get(name, [()]))
    expected = {1: ring, 2: 2 * 3 * (chip.slice_hop_s + share / 8 / chip.slice_rate)}
    expected[4] = 2 * 3 * (chip.slice_hop_s + share / 16 / chip.slice_rate)
    if name == "xla":
        assert 0 < four - one <= ring * (1 + 1e-9)
    else:
        assert four - one == pytest.approx(expected[paths], rel=1e-6)


def test_pods_whose_network_between_slices_is_not_known_have_no_forecast():
    with pytest.raises(UserError, match="nothing is known of the network between slices of v3"):
        network.PodLinks(parse_pod("v3:4x4*2")).time_compiler_sum(1e6)
