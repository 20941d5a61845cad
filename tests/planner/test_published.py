"""Published runs: every row has its source, a half that a rule decides, and a plan."""

import dataclasses
import zlib

import pytest

from podscale.errors import UserError
from podscale.forecast import chips
from podscale.planner import published
from podscale.pod import parse_pod

TABLE = chips.read_tables("podscale.planner", "published.toml")["mlperf"]


def test_every_row_names_a_log_of_its_own():
    ids = [row["id"] for row in TABLE["rows"]]
    logs = [(row["id"].partition("/")[0], row["log"]) for row in TABLE["rows"]]
    assert len(set(ids)) == len(set(logs)) == len(ids)
    for row in TABLE["rows"]:
        _, submitter, system = row["id"].split("/")
        assert row["log"].removeprefix("v0.5.0/").startswith(submitter + "/")
        assert f"/{system}/" in row["log"]
        assert "/resnet/" in row["log"]


def test_the_middle_run_is_close_to_the_mean_of_the_middle_three():
    for row in TABLE["rows"]:
        assert row["seconds"] / 60 == pytest.approx(row["minutes"], rel=0.05), row["id"]


def test_the_parity_of_the_id_decides_the_half_of_every_row_that_was_not_known():
    assert set(TABLE["known"]) <= {row["id"] for row in TABLE["rows"]}
    halves = {part: {run.name for run in published.load_runs(part)} for part in ("first", "second")}
    assert halves["first"] | halves["second"] == {row["id"] for row in TABLE["rows"] if "pod" in row}
    assert not any(zlib.crc32(name.encode()) % 2 for name in halves["first"] - set(TABLE["known"]))
    assert all(zlib.crc32(name.encode()) % 2 for name in halves["second"])


@pytest.mark.parametrize("part", ["first", "second"])
def test_every_row_has_a_plan_on_as_many_chips(part):
    count = {row["id"]: row["chips"] for row in TABLE["rows"]}
    for run in published.load_runs(part):
        pod = parse_pod(run.pod)
        assert pod.rows * pod.cols == count[run.name]
        plan = published.plan_run(run)
        assert plan.images_per_device * pod.size == run.batch


@pytest.mark.parametrize("part", ["known", "first", "second"])
def test_every_run_has_a_program_with_a_source(part):
    for run in published.load_runs(part):
        software, options = published.find_software(run)
        assert software.sums_in_place != parse_pod(run.pod).is_gpu_cluster
        assert options.summation in ("auto", "xla", "ring")
    rows = chips.read_tables("podscale.planner", "published.toml")["software"]
    assert all(len(row["source"]) > 10 for row in rows)


def test_a_run_without_a_program_is_refused_in_one_sentence():
    run = dataclasses.replace(published.load_runs("known")[0], name="MLPerf 9.9")
    with pytest.raises(UserError, match=r"describes no program of MLPerf 9\.9"):
        published.find_software(run)


def test_updates_are_sharded_from_the_round_whose_paper_says_so():
    shards = {run.round: published.find_software(run)[0].shards_update for run in published.load_runs("known")}
    assert shards == {"0.5": False, "paper": False, "0.6": True, "0.7": True}


@pytest.mark.heavy
def test_the_first_half_is_predicted():
    errors = sorted(abs(c.error) for c in published.compare_runs("first"))
    assert errors[len(errors) // 2] <= 0.05
    assert sum(error > 0.25 for error in errors) <= 3
    assert errors[-1] <= 0.30


def test_the_second_half_is_predicted_as_well_as_the_documentation_says():
    errors = sorted(abs(c.error) for c in published.compare_runs("second"))
    assert errors[len(errors) // 2] <= 0.035
    assert sum(error > 0.25 for error in errors) == 1


@pytest.mark.heavy
def test_boards_that_gave_a_chip_its_level_are_predicted():
    errors = {c.run.name: c.error for c in published.compare_runs("first")}
    assert all(abs(errors[name]) <= 0.03 for name in TABLE["known"] if name != "0.7/NVIDIA/dgxa100_n96_ngc20.06_mxnet")
