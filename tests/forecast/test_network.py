"""The closed forms of `forecast.network` against a torus whose every message goes over its own link, step by step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.errors import UserError
from podscale.forecast import network
from podscale.forecast.chips import chip, kinds
from podscale.forecast.network import Axis
from podscale.parallel.collectives import hamiltonian
from podscale.parallel.summation import STRATEGIES
from podscale.pod import CHIPS, named

RATE, HOP = 70e9, 1e-6


class Torus:
    """Chips as rows x columns. A link goes from a chip in one of four directions and carries one message at a time."""

    def __init__(self, rows, cols):
        self.rows, self.cols, self.clock = rows, cols, 0.0

    def round(self, messages):
        """All messages (chip, direction, bytes) at once; the next round begins when the last one has arrived."""
        links = [(chip, direction) for chip, direction, _ in messages]
        assert len(set(links)) == len(links), "a link is used twice at once"
        if messages:
            self.clock += max(HOP + size / RATE for *_, size in messages)


class Lane:
    """A part of the data on its way along rings: (row ring or column ring, direction) one after the other."""

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
        """Every chip's message of one hop; none once the ring is round."""
        if number >= self.length(stage) - 1:
            return []
        chips = [(r, c) for r in range(self.torus.rows) for c in range(self.torus.cols)]
        return [(place, self.rings[stage], self.message(stage)) for place in chips]


def simulated(rows, cols, size, paths):
    """Scatters along each path's rings in turn, all lanes hop by hop together, and gathers along them in reverse."""
    torus = Torus(rows, cols)
    lanes = [Lane(torus, size / len(paths), path) for path in paths]
    stages = list(range(len(paths[0])))
    for stage in stages + stages[::-1]:
        for number in range(max(lane.length(stage) for lane in lanes) - 1):
            torus.round([message for lane in lanes for message in lane.hop(stage, number)])
    return torus.clock


def walked(rows, cols, size, ways):
    """The ring through all chips: each hop of the walk must be a link of the torus, whichever way round."""
    torus, walk = Torus(rows, cols), hamiltonian(rows, cols)
    count, moves = len(walk), []
    for way in ways:
        for place, (a, b) in enumerate(zip(walk, walk[1:] + walk[:1], strict=True)):
            here, there = (a, b) if way == 1 else (b, a)
            step = ((there[0] - here[0]) % rows, (there[1] - here[1]) % cols)
            assert step in {(0, 1 % cols), (0, -1 % cols), (1 % rows, 0), (-1 % rows, 0)}
            # Between two chips of a ring of two there are two links; a walk may take either.
            two = (rows == 2 and step[0]) or (cols == 2 and step[1])
            moves.append((here, (step, way, place) if two else step, size / len(ways) / count))
    torus.round(moves)  # every round is like the first
    return torus.clock * 2 * (count - 1)


ROWS = ("row", 1), ("column", 1)
FOUR = [
    (("row", 1), ("column", 1)),
    (("row", -1), ("column", -1)),
    (("column", 1), ("row", 1)),
    (("column", -1), ("row", -1)),
]
SHAPES = [(1, 2), (2, 2), (2, 3), (3, 3), (4, 4), (4, 8), (8, 4), (16, 16), (16, 32), (32, 32)]


def axes(rows, cols, rate=RATE, hop=HOP):
    return Axis(cols, rate, hop), Axis(rows, rate, hop)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("size", [512.0, 102e6])
def test_the_torus_takes_as_long_as_its_messages(rows, cols, size):
    assert network.torus(axes(rows, cols), size) == pytest.approx(simulated(rows, cols, size, [ROWS]), rel=1e-9)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("size", [512.0, 102e6])
def test_four_lanes_use_no_link_twice_and_take_as_long_as_their_messages(rows, cols, size):
    assert network.all_links(axes(rows, cols), size) == pytest.approx(simulated(rows, cols, size, FOUR), rel=1e-9)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize(("ways", "form"), [((1,), network.ring), ((1, -1), network.ring_both_ways)])
def test_a_ring_takes_as_long_as_its_messages(rows, cols, ways, form):
    assert form(axes(rows, cols), 1e6) == pytest.approx(walked(rows, cols, 1e6, ways), rel=1e-9)


@pytest.mark.parametrize(("rows", "cols"), [(4, 4), (32, 32)])
def test_colours_are_four_lanes_where_the_torus_is_square(rows, cols):
    square = axes(rows, cols)
    assert network.colours(square, 1e8) == pytest.approx(network.all_links(square, 1e8))


def test_the_compilers_sum_of_a_third_dimension_uses_six_links():
    flat, deep = (Axis(16, RATE, 0.0),) * 2, (Axis(16, RATE, 0.0),) * 3
    assert network.colours(deep, 1e9) == pytest.approx(network.colours(flat, 1e9) * 2 / 3, rel=0.01)


# --- what must hold whatever the numbers ---------------------------------------------------------------------------

FORMS = [network.ring, network.ring_both_ways, network.torus, network.all_links, network.colours]
sizes = st.integers(1, 40)


@given(rows=sizes, cols=sizes, size=st.floats(1, 1e9), rate=st.floats(1e6, 1e12), more=st.floats(1, 100))
@settings(max_examples=60, deadline=None)
def test_faster_links_and_less_data_never_take_longer(rows, cols, size, rate, more):
    for form in FORMS:
        took = form(axes(rows, cols, rate), size)
        assert form(axes(rows, cols, rate * more), size) <= took * (1 + 1e-12)
        assert form(axes(rows, cols, rate), size / more) <= took * (1 + 1e-12)
        assert form(axes(rows, cols, rate, HOP / more), size) <= took * (1 + 1e-12)


@given(rows=sizes, cols=sizes, size=st.floats(1, 1e9))
@settings(max_examples=60, deadline=None)
def test_no_sum_is_faster_than_its_bytes_through_all_links(rows, cols, size):
    chips = rows * cols
    least = 2 * size * (chips - 1) / chips / (4 * RATE)
    for form in FORMS:
        assert form(axes(rows, cols, hop=0.0), size) >= least * (1 - 1e-9)


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_pod_sums_in_a_time_above_nothing(kind, strategy):
    for shape in ("1x1", "1x8", "4x8", "128x8"):
        seconds = network.summation_s(named(f"{kind}:{shape}"), strategy, 1e8)
        assert seconds > 0 or (shape == "1x1" and chip(kind).cores == 1)


def test_a_tile_of_one_device_sends_nothing_and_a_larger_one_takes_longer():
    pod = named("v4:8x8")
    times = [network.group_s(pod, tile, 4096) for tile in ((1, 1), (1, 2), (2, 2), (4, 4))]
    assert times[0] == 0
    assert times == sorted(times)


@pytest.mark.parametrize(("size", "rate", "hop"), [(0, 1.0, 0.0), (-1, 1.0, 0.0), (4, 0.0, 0.0), (4, 1.0, -1.0)])
def test_an_axis_that_cannot_be_is_refused(size, rate, hop):
    with pytest.raises(UserError, match="cannot be"):
        Axis(size, rate, hop)


def test_every_chip_kind_but_the_cpu_has_a_row():
    assert set(kinds()) == set(CHIPS) - {"cpu"}
    for kind in kinds():
        row = chip(kind)
        assert (row.cores, row.chips_per_host) == CHIPS[kind][:2]
        assert row.memory_bytes // row.cores == CHIPS[kind][2]
        assert len(row.source) > 40
