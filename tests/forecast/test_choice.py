"""Which summation `auto` chooses: by the chip's links, by measured links, or as in the run's first session."""

import math

import jax
import numpy as np
import pytest

from podscale import pod
from podscale import recipe as recipes
from podscale.bench import sums
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.forecast import choice, probe
from podscale.forecast.probe import LinearCost, Probe
from podscale.parallel.strategies import STRATEGIES, list_replicated
from podscale.parallel.summation import Load
from podscale.planner import questions
from podscale.pod import Pod, named_pod

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


def test_torus4_is_chosen_if_four_links_are_as_fast_as_one(monkeypatch):
    result = choose(monkeypatch, make_links())
    assert result.options.summation == "torus4"
    assert result.options.bucket_mib == 0  # nothing hides behind the backward pass here: one sum has least latency
    assert set(result.predicted) == set(list_replicated())
    assert result.predicted["torus"] == pytest.approx(12 * 2e-3 + 2 * 15 / 16 * 4 * RESNET50 / 3e6)
    assert result.predicted["torus4"] == pytest.approx(12 * 2e-3 + 2 * 15 / 16 * RESNET50 / 3e6)
    (row,) = choice.format_rows(result)
    assert row[0] == "by measured links"
    assert row[1].startswith("torus4 ")


def test_torus_is_chosen_if_links_share_a_port(monkeypatch):
    shared = LinearCost(8e-3, 3e6 / 4)
    assert choose(monkeypatch, make_links(four=shared, ring2=shared), parameters=1000).options.summation == "torus"


def test_a_strategy_hardly_faster_than_xla_is_not_chosen(monkeypatch):
    fast = LinearCost(1e-6, 1e9)
    assert choose(monkeypatch, make_links(xla=fast)).options.summation == "xla"


def test_the_users_options_are_kept(monkeypatch):
    result = choose(monkeypatch, make_links(), summation="ring", bucket_mib=4)
    assert (result.options.summation, result.options.bucket_mib, result.predicted) == ("ring", 4, {})
    assert choose(monkeypatch, make_links(), bucket_mib=8).options.bucket_mib == 8


@pytest.mark.parametrize("name", ["v3:4x4", "v5e:16x16", "v4:4x4x4"])
def test_tpus_use_the_compilers_sum(name):
    result = choice.choose_summation(Options(), named_pod(name), RESNET50)
    assert result.options.summation == "xla"
    assert result.predicted["xla"] <= 1.001 * min(result.predicted.values())
    assert result.source.startswith("the links of v")


def test_gpus_not_available_are_chosen_for_by_their_links():
    result = choice.choose_summation(Options(), named_pod("h100:16x8"), RESNET50)
    assert result.predicted[result.options.summation] <= min(result.predicted.values()) / choice.MAX_TIME_RATIO
    assert result.options.bucket_mib in choice.BUCKETS_MIB


def test_one_machine_uses_xla_without_measuring(monkeypatch):
    monkeypatch.setattr(probe, "measure_links", lambda pod: pytest.fail("measured"))
    for here in (Pod("cpu", 1, 1), pod.make_pod(jax.devices(), "2x2"), Pod("cpu", 2, 2, hosts=4, devices=(1, 2, 3, 4))):
        result = choice.choose_summation(Options(), here, RESNET50)
        assert (result.options.summation, result.predicted, choice.format_rows(result)) == ("xla", {}, [])


def test_a_resumed_run_keeps_its_choice():
    here = Pod("cpu", 2, 2, hosts=4)
    plan = {"pod": {"kind": "cpu", "rows": 2, "cols": 2, "cores": 1, "hosts": 4, "devices": 4}}
    plan |= {"summation": "torus", "bucket_bytes": 8 << 20}
    options = choice.reuse_choice(Options(), here, plan)
    assert (options.summation, options.bucket_mib) == ("torus", 8)
    assert choice.reuse_choice(Options(summation="ring"), here, plan).summation == "ring"
    assert choice.reuse_choice(Options(), Pod("cpu", 1, 4, hosts=4), plan).summation == "auto"
    assert choice.reuse_choice(Options(), here, None).summation == "auto"


@pytest.mark.heavy
def test_a_plan_lists_the_choice_and_the_times_of_all_strategies():
    recipe = recipes.load_recipe("resnet50-imagenet-32k")
    rows = dict(questions.plan_on_pod(recipe, named_pod("v3:32x32"), Options(), compiles=False).rows)
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
    costs = {name: LinearCost(**value) for name, value in links.items() if isinstance(value, dict)}
    return Probe(links["rows"], links["cols"], **costs).chip_rate


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
    assert np.isfinite(result.chip_rate)


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
