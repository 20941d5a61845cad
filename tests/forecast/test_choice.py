"""Which summation `auto` chooses: by the chip's links, by measured links, or as in the run's first session."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

from podscale import pod
from podscale import recipe as recipes
from podscale.bench import sums
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.forecast import choice, probe
from podscale.forecast.probe import LinearCost, Probe, SampledCost
from podscale.parallel.strategies import STRATEGIES, find_summation, list_replicated
from podscale.parallel.summation import Load
from podscale.planner import queries
from podscale.pod import Pod, parse_pod

RESNET50 = 25_557_032
SLOW = LinearCost(2e-3, 3e6)


def make_links(**costs):
    """Return a 4x4 torus whose links have equal costs, except those given."""
    equal = dict.fromkeys(("row", "column", "ring", "ring2", "four"), SLOW)
    return Probe(4, 4, **equal | {"cores": LinearCost(0.0, math.inf), "xla": LinearCost(0.1, 1.6e6)} | costs)


def choose(monkeypatch, links, parameters=RESNET50, **options):
    """Choose a summation on a 4x4 pod of 16 hosts with these links."""
    monkeypatch.setattr(probe, "measure_links", lambda pod: links)
    monkeypatch.setattr(choice, "_is_one_machine", lambda: False)
    devices = tuple(range(16))
    here = Pod("cpu", 4, 4, hosts=16, devices=devices)
    return choice.choose_summation(Options(**options), here, parameters)


def test_torus4_is_chosen_for_large_sums_if_four_links_are_as_fast_as_one(monkeypatch):
    result = choose(monkeypatch, make_links())
    names = re.sub(r":\d+", "", result.options.summation)
    assert names == "swing_latency,swing,torus4"  # fewest messages, then fewer bytes, then all links
    assert result.options.bucket_mib == 0  # nothing hides behind the backward pass here: one sum has least latency
    assert set(result.predicted) == set(list_replicated())
    assert result.predicted["torus"] == pytest.approx(12 * 2e-3 + 2 * 15 / 16 * 4 * RESNET50 / 3e6)
    assert result.predicted["torus4"] == pytest.approx(12 * 2e-3 + 2 * 15 / 16 * RESNET50 / 3e6)
    (row,) = choice.format_rows(result)
    assert row[0] == "by measured links"
    assert row[1].startswith("torus4 ")


def test_every_sum_gets_the_fastest_strategy_for_its_size(monkeypatch):
    links = make_links()
    chosen = find_summation(choose(monkeypatch, links).options.summation)
    for size in np.geomspace(64, 4 * RESNET50, 50):
        fastest = min(STRATEGIES[name].predict_s(links, Load(size)) for name in list_replicated())
        assert chosen.predict_s(links, Load(size)) <= 1.03 * fastest


def test_torus_is_chosen_for_large_sums_if_links_share_a_port_and_pairs_take_turns(monkeypatch):
    shared, turns = LinearCost(8e-3, 3e6 / 4), LinearCost(2e-3, 1.5e6)
    slower = LinearCost(0.1, 1.4e6)  # by more than the margin that a strategy must be ahead of the compiler's sum
    links = make_links(four=shared, ring2=shared, row_pairs=turns, column_pairs=turns, xla=slower)
    assert choose(monkeypatch, links, parameters=10**6).options.summation.endswith(",torus")
    assert choose(monkeypatch, links, parameters=100).options.summation == "swing_latency"


@pytest.mark.parametrize(("line_s", "expected"), [(60e-3, "swing_latency"), (3e-3, "xla")])
def test_batch_norm_sums_by_exchanges_where_they_were_timed_as_faster_than_the_compiler(monkeypatch, line_s, expected):
    """Along a row of four: two messages of 2 ms and 4 KB, 6.7 ms in all."""
    links = make_links(line=LinearCost(line_s, 3e6))
    assert choose(monkeypatch, links).options.tile_summation == expected
    assert choose(monkeypatch, links, tile_summation="xla").options.tile_summation == "xla"


def test_a_strategy_hardly_faster_than_xla_is_not_chosen(monkeypatch):
    fast = LinearCost(1e-6, 1e9)
    assert choose(monkeypatch, make_links(xla=fast)).options.summation == "xla"


def test_the_users_options_are_kept(monkeypatch):
    result = choose(monkeypatch, make_links(), summation="ring", bucket_mib=4)
    assert (result.options.summation, result.options.bucket_mib, result.predicted) == ("ring", 4, {})
    assert choose(monkeypatch, make_links(), bucket_mib=8).options.bucket_mib == 8


@pytest.mark.parametrize("name", ["v3:4x4", "v5e:16x16", "v4:4x4x4"])
def test_tpus_use_the_compilers_sum(name):
    result = choice.choose_summation(Options(), parse_pod(name), RESNET50)
    assert result.options.summation == "xla"
    assert result.predicted["xla"] <= 1.001 * min(result.predicted.values())
    assert result.source.startswith("the links of v")


def test_gpus_not_available_are_chosen_for_by_their_links():
    result = choice.choose_summation(Options(), parse_pod("h100:16x8"), RESNET50)
    largest = result.options.summation.split(",")[-1]
    assert result.predicted[largest] <= min(result.predicted.values()) / choice.MAX_TIME_RATIO
    assert result.options.bucket_mib in choice.BUCKETS_MIB


def test_one_machine_uses_xla_without_measuring(monkeypatch):
    monkeypatch.setattr(probe, "measure_links", lambda pod: pytest.fail("measured"))
    for here in (Pod("cpu", 1, 1), pod.make_pod(jax.devices(), "2x2"), Pod("cpu", 2, 2, hosts=4, devices=(1, 2, 3, 4))):
        result = choice.choose_summation(Options(), here, RESNET50)
        assert (result.options.summation, result.predicted, choice.format_rows(result)) == ("xla", {}, [])


def test_a_resumed_run_keeps_its_choice():
    here = Pod("cpu", 2, 2, hosts=4)
    plan = {"pod": {"kind": "cpu", "rows": 2, "cols": 2, "cores": 1, "hosts": 4, "devices": 4}}
    plan |= {"summation": "swing_latency:4096,torus", "bucket_bytes": 8 << 20, "tile_summation": "swing_latency"}
    options = choice.reuse_choice(Options(), here, plan)
    assert (options.summation, options.bucket_mib) == ("swing_latency:4096,torus", 8)
    assert options.tile_summation == "swing_latency"
    older = {name: value for name, value in plan.items() if name != "tile_summation"} | {"summation": "torus"}
    assert choice.reuse_choice(Options(), here, older).summation == "torus"
    assert choice.reuse_choice(Options(), here, plan | {"summation": "of a plugin"}).summation == "auto"
    assert choice.reuse_choice(Options(summation="ring"), here, plan).summation == "ring"
    assert choice.reuse_choice(Options(), Pod("cpu", 1, 4, hosts=4), plan).summation == "auto"
    assert choice.reuse_choice(Options(), here, None).summation == "auto"


@pytest.mark.heavy
def test_a_plan_lists_the_choice_and_the_times_of_all_strategies():
    recipe = recipes.load_recipe("resnet50-imagenet-32k")
    rows = dict(queries.plan_on_pod(recipe, parse_pod("v3:32x32"), Options(), compiles=False).rows)
    assert rows["summation"].startswith("xla")
    assert all(name in rows["summations"] for name in STRATEGIES)


# --- measurement ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measurement():
    recipe = recipes.override_recipe(recipes.load_recipe("digits"), {"model.width": 8})
    settings = {"sizes": (64, 4096), "repeats": 2}
    return sums.measure_sums(recipe, pod.make_pod(jax.devices(), "2x2", 2), **settings)


@pytest.mark.heavy
def test_every_strategy_is_timed_on_every_payload_and_sums_exactly(measurement):
    points = measurement["points"]
    assert {(p["strategy"], p["payload"]) for p in points} == {
        (name, payload) for name in list_replicated() for payload in ("64 B", "4,096 B", "resnet8")
    }
    for point in points:
        assert point["relative_error"] == 0
        assert point["ms"] > 0
        assert point["model_ms"] > 0
        assert point["algorithm_rate"] == pytest.approx(point["bytes"] / point["ms"] * 1e3)
        assert point["bus_rate"] == pytest.approx(point["algorithm_rate"] * 2 * 3 / 4)
        assert point["link_share"] == pytest.approx(point["bus_rate"] / compute_chip_rate(measurement["links"]))


def compute_chip_rate(links):
    return Probe.from_dict(links).chip_rate


@pytest.mark.heavy
def test_the_table_has_a_row_for_each_point(measurement):
    rows = sums.format_rows(measurement)
    assert len(rows) == len(measurement["points"])
    assert all(len(row) == len(sums.HEADER) for row in rows)


def test_predictions_are_the_closed_forms_of_measured_costs():
    result = make_links(row=LinearCost(1e-3, 1e6), column=LinearCost(2e-3, 2e6), ring=LinearCost(3e-3, 1e6))
    size = 16e6
    assert STRATEGIES["ring"].predict_s(result, Load(size)) == pytest.approx(30 * (3e-3 + 1.0))
    assert STRATEGIES["torus"].predict_s(result, Load(size)) == pytest.approx(6 * (1e-3 + 4.0) + 6 * (2e-3 + 0.5))
    assert STRATEGIES["xla"].predict_s(result, Load(size)) == pytest.approx(0.1 + 10.0)
    whole = 2 * (1e-3 + 16.0) + 2 * (2e-3 + 8.0)
    assert STRATEGIES["swing_latency"].predict_s(result, Load(size)) == pytest.approx(whole)
    halves = 2 * ((1e-3 + 8.0) + (2e-3 + 2.0) + (1e-3 + 2.0) + (2e-3 + 0.5))  # rows and columns in turn
    assert STRATEGIES["swing"].predict_s(result, Load(size)) == pytest.approx(halves)
    assert np.isfinite(result.chip_rate)


def test_exchanges_of_whole_arrays_take_as_long_as_messages_of_their_size_were_measured():
    """The first 4 KB leave in 1 ms after the latency, where a straight line from 256 KB says 4."""
    measured = LinearCost(2e-3, 1.024e6, middle_s=3e-3)
    links = make_links(row=measured, column=measured)
    assert STRATEGIES["swing_latency"].predict_s(links, Load(4096)) == pytest.approx(4 * 3e-3)
    assert STRATEGIES["swing_latency"].predict_s(links, Load(1024)) == pytest.approx(4 * 2.25e-3)
    assert STRATEGIES["swing_latency"].predict_s(links, Load(2**18)) == pytest.approx(4 * (2e-3 + 0.256))
    line = make_links(row=LinearCost(2e-3, 1.024e6), column=LinearCost(2e-3, 1.024e6))  # others are as before
    assert STRATEGIES["torus"].predict_s(links, Load(4096)) == STRATEGIES["torus"].predict_s(line, Load(4096))
    again = Probe.from_dict(json.loads(json.dumps(links.to_dict())))
    assert again.row == measured


def test_paths_whose_messages_are_sent_in_turn_cost_less_once_the_shorter_ring_has_finished():
    """On 3x4, torus4 sends rows-first and columns-first quarters in separate messages: "four" is the cost of both.

    In each stage, two hops of both and one hop of the longer ring alone, which costs half.
    """
    links = dataclasses.replace(make_links(four=LinearCost(8e-3, math.inf)), rows=3)
    assert STRATEGIES["torus4"].predict_s(links, Load(1.0)) == pytest.approx(4 * 2.5 * 8e-3)
    square = dataclasses.replace(links, rows=4)
    assert STRATEGIES["torus4"].predict_s(square, Load(1.0)) == pytest.approx(4 * 3 * 8e-3)


@pytest.mark.parametrize(("all_links", "shared"), [(5e5, 0.0), (4e5, 0.25), (1e5, 1.0)])
def test_paths_of_own_cores_wait_for_each_other_between_stages_only(all_links, shared):
    """On 2x8 with four cores: seven hops along rows beside one along columns, then the same the other way round."""
    costs = {"row2": LinearCost(2e-3, 2e6), "column2": LinearCost(4e-3, 5e5), "four": LinearCost(8e-3, all_links)}
    links = make_links(**costs)
    links = dataclasses.replace(links, rows=2, cols=8, per_chip=4)
    rows_s, columns_s = 7 * (2e-3 + 2e6 / 2e6), 4e-3 + 8e6 / 5e5
    then_columns_s, then_rows_s = 4e-3 + 1e6 / 5e5, 7 * (2e-3 + 1e6 / 2e6)
    rows_bytes_s, then_columns_bytes_s = rows_s - 7 * 2e-3, then_columns_s - 4e-3  # only bytes share a wire
    expected = 2 * (columns_s + shared * rows_bytes_s + then_rows_s + shared * then_columns_bytes_s)
    assert STRATEGIES["torus4"].predict_s(links, Load(6.4e7)) == pytest.approx(expected)


def test_the_compilers_sum_is_interpolated_between_measured_sizes():
    cost = SampledCost((64, 1064, 2064), (1.0, 3.0, 4.0))
    assert [cost.predict_s(size) for size in (4, 64, 564, 1564, 4128)] == pytest.approx([1.0, 1.0, 2.0, 3.5, 8.0])


def test_links_survive_json():
    links = make_links(xla=SampledCost((64, 128), (0.1, 0.2)), line=SLOW)
    text = json.dumps(links.to_dict()).replace("Infinity", "null")  # as `bench sum --json` writes it
    assert Probe.from_dict(json.loads(text)) == links


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategies": ("toruss",)}, "did you mean torus"),
        ({"sizes": (2,)}, "--bytes at least 4"),
        ({"repeats": 0}, "--repeats must be at least 1"),
    ],
)
def test_impossible_measurements_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        sums.measure_sums(recipes.load_recipe("digits"), pod.make_pod(jax.devices(), "2x2"), **settings)
    with pytest.raises(UserError, match="one device has nothing to sum with"):
        sums.measure_sums(recipes.load_recipe("digits"), pod.make_pod(jax.devices(), "1x1"))
