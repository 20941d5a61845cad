"""Which summation `auto` takes: by the chip's links, by measured ones, or as a run began."""

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
from podscale.forecast.probe import Line, Probe
from podscale.parallel.summation import STRATEGIES
from podscale.planner import questions
from podscale.pod import Pod, named

RESNET50 = 25_557_032
SLOW = Line(2e-3, 3e6)


def links(**lines):
    """A 4x4 torus whose links are all alike, but for what is given."""
    alike = dict.fromkeys(("row", "column", "ring", "ring2", "four"), SLOW)
    return Probe(4, 4, **alike | {"cores": Line(0.0, math.inf), "xla": Line(0.1, 1.6e6)} | lines)


def chosen(monkeypatch, found, parameters=RESNET50, **options):
    monkeypatch.setattr(probe, "measured", lambda where: found)
    monkeypatch.setattr(choice, "_one_machine", lambda: False)
    devices = tuple(range(16))
    here = Pod("cpu", 4, 4, hosts=16, devices=devices)
    return choice.settled(Options(**options), here, parameters)


def test_four_links_at_once_are_taken_where_they_are_as_fast_as_one(monkeypatch):
    found = chosen(monkeypatch, links())
    assert found.options.summation == "torus4"
    assert found.options.bucket_mib == 0  # nothing hides behind the backward pass here: one sum has least latency
    assert set(found.predicted) == set(STRATEGIES)
    assert found.predicted["torus"] == pytest.approx(12 * 2e-3 + 2 * 15 / 16 * 4 * RESNET50 / 3e6)
    assert found.predicted["torus4"] == pytest.approx(12 * 2e-3 + 2 * 15 / 16 * RESNET50 / 3e6)
    (row,) = choice.told(found)
    assert row[0] == "by measured links"
    assert row[1].startswith("torus4 ")


def test_one_at_a_time_is_taken_where_links_share_a_port(monkeypatch):
    shared = Line(8e-3, 3e6 / 4)
    assert chosen(monkeypatch, links(four=shared, ring2=shared), parameters=1000).options.summation == "torus"


def test_what_is_hardly_faster_than_xla_is_not_taken(monkeypatch):
    fast = Line(1e-6, 1e9)
    assert chosen(monkeypatch, links(xla=fast)).options.summation == "xla"


def test_what_the_user_says_stands(monkeypatch):
    found = chosen(monkeypatch, links(), summation="ring", bucket_mib=4)
    assert (found.options.summation, found.options.bucket_mib, found.predicted) == ("ring", 4, {})
    assert chosen(monkeypatch, links(), bucket_mib=8).options.bucket_mib == 8


@pytest.mark.parametrize("name", ["v3:4x4", "v5e:16x16", "v4:4x4x4"])
def test_on_tpu_it_is_the_compilers_own(name):
    found = choice.settled(Options(), named(name), RESNET50)
    assert found.options.summation == "xla"
    assert found.predicted["xla"] <= 1.001 * min(found.predicted.values())
    assert found.known_by.startswith("the links of v")


def test_gpus_that_are_not_here_are_chosen_for_by_their_links():
    found = choice.settled(Options(), named("h100:16x8"), RESNET50)
    assert found.predicted[found.options.summation] <= min(found.predicted.values()) / choice.WORTH
    assert found.options.bucket_mib in choice.BUCKETS_MIB


def test_alone_there_is_nothing_to_choose_nor_to_measure(monkeypatch):
    monkeypatch.setattr(probe, "measured", lambda where: pytest.fail("measured"))
    for here in (Pod("cpu", 1, 1), pod.of(jax.devices(), "2x2"), Pod("cpu", 2, 2, hosts=4, devices=(1, 2, 3, 4))):
        found = choice.settled(Options(), here, RESNET50)
        assert (found.options.summation, found.predicted, choice.told(found)) == ("xla", {}, [])


def test_a_run_that_goes_on_keeps_what_was_chosen():
    here = Pod("cpu", 2, 2, hosts=4)
    plan = {"pod": {"kind": "cpu", "rows": 2, "cols": 2, "cores": 1, "hosts": 4, "devices": 4}}
    plan |= {"summation": "torus", "bucket_bytes": 8 << 20}
    kept = choice.as_before(Options(), here, plan)
    assert (kept.summation, kept.bucket_mib) == ("torus", 8)
    assert choice.as_before(Options(summation="ring"), here, plan).summation == "ring"
    assert choice.as_before(Options(), Pod("cpu", 1, 4, hosts=4), plan).summation == "auto"
    assert choice.as_before(Options(), here, None).summation == "auto"


def test_a_plan_says_what_was_chosen_and_what_the_others_would_take():
    recipe = recipes.load("resnet50-imagenet-32k")
    rows = dict(questions.about(recipe, named("v3:32x32"), Options(), compiles=False).rows)
    assert rows["summation"].startswith("xla")
    assert all(name in rows["summations"] for name in (*STRATEGIES, "sharded"))


# --- measuring -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    recipe = recipes.override(recipes.load("digits"), {"model.width": 8})
    asked = {"sizes": (64, 4096), "repeats": 2}
    return sums.measure(recipe, pod.of(jax.devices(), "2x2", 2), **asked)


def test_every_strategy_is_timed_on_every_payload_and_sums_exactly(measured):
    points = measured["points"]
    assert {(p["strategy"], p["payload"]) for p in points} == {
        (name, payload) for name in STRATEGIES for payload in ("64 B", "4,096 B", "resnet8")
    }
    for point in points:
        assert point["relative_error"] == 0
        assert point["ms"] > 0
        assert point["model_ms"] > 0
        assert point["algorithm_rate"] == pytest.approx(point["bytes"] / point["ms"] * 1e3)
        assert point["bus_rate"] == pytest.approx(point["algorithm_rate"] * 2 * 3 / 4)
        assert point["link_share"] == pytest.approx(point["bus_rate"] / chip_rate(measured["links"]))


def chip_rate(told):
    lines = {name: Line(**value) for name, value in told.items() if isinstance(value, dict)}
    return Probe(told["rows"], told["cols"], **lines).chip_rate


def test_the_table_has_a_row_for_each_point(measured):
    rows = sums.rows(measured)
    assert len(rows) == len(measured["points"])
    assert all(len(row) == len(sums.HEAD) for row in rows)


def test_the_model_is_the_closed_form_of_what_was_measured():
    found = links(row=Line(1e-3, 1e6), column=Line(2e-3, 2e6), ring=Line(3e-3, 1e6))
    size = 16e6
    assert found.summation_s("ring", size) == pytest.approx(30 * (3e-3 + 1.0))
    assert found.summation_s("torus", size) == pytest.approx(6 * (1e-3 + 4.0) + 6 * (2e-3 + 0.5))
    assert found.summation_s("xla", size) == pytest.approx(0.1 + 10.0)
    assert np.isfinite(found.chip_rate)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"strategies": ("toruss",)}, "did you mean torus"),
        ({"sizes": (2,)}, "--bytes at least 4"),
        ({"repeats": 0}, "--repeats must be at least 1"),
    ],
)
def test_impossible_measurements_are_refused(asked, words):
    with pytest.raises(UserError, match=words):
        sums.measure(recipes.load("digits"), pod.of(jax.devices(), "2x2"), **asked)
    with pytest.raises(UserError, match="one device has nothing to sum with"):
        sums.measure(recipes.load("digits"), pod.of(jax.devices(), "1x1"))
