"""Runs in a bucket: working copies, and owners that follow one another without overwriting each other's work."""

import json

import pytest
from support.faulty_proxy import Fault, FaultyProxy

from podscale.errors import UserError
from podscale.runs import bucket as buckets
from podscale.runs.bucket import RunBucket, RunTakenOverError
from podscale.runs.folder import Run
from podscale.storage.locations import parse_location


@pytest.fixture(params=["s3", "gs"])
def open_run(request, tmp_path):
    """A function that opens the same run, each time as another process would."""
    bucket = request.getfixturevalue({"s3": "bucket", "gs": "google_bucket"}[request.param])

    def open_run():
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return RunBucket(parse_location(f"{request.param}://{bucket}/runs/one"), folder)

    return open_run


def add(step, key):
    return lambda current: current["steps"].update({str(step): {"key": key, "accuracy": None}})


def test_a_working_copy_has_the_files_that_were_sent(open_run):
    run = open_run()
    run.take_over(1)
    (run.folder / "deep").mkdir()
    (run.folder / "deep" / "a.txt").write_text("one")
    (run.folder / "metrics.jsonl").write_text("1\n")
    (run.folder / "x.part").write_text("half")
    run.push()
    (run.folder / "metrics.jsonl").write_text("1\n2\n")
    before = run.store.requests["put"]
    run.push()
    assert run.store.requests["put"] == before + 1  # what has not changed is not sent again
    other = open_run()
    other.pull()
    copied = {path.relative_to(other.folder).as_posix() for path in other.folder.rglob("*") if path.is_file()}
    assert copied == {"deep/a.txt", "metrics.jsonl"}
    assert (other.folder / "metrics.jsonl").read_text() == "1\n2\n"


def test_a_stalled_former_owner_can_commit_nothing_and_overwrites_nothing(open_run):
    first, second = open_run(), open_run()
    first.take_over(1)
    (first.folder / "metrics.jsonl").write_text("first\n")
    first.push()
    first.commit(add(10, "10-a"))
    second.take_over(2)
    (second.folder / "metrics.jsonl").write_text("first\nsecond\n")
    second.push()
    (first.folder / "metrics.jsonl").write_text("first\nstalled\n")
    first.push()
    with pytest.raises(RunTakenOverError, match="has been taken over by another process"):
        first.commit(add(20, "20-a"))
    assert list(first.current["steps"]) == ["10"]
    second.commit(add(20, "20-b"))
    reader = open_run()
    reader.pull()
    assert (reader.folder / "metrics.jsonl").read_text() == "first\nsecond\n"
    assert {step: entry["key"] for step, entry in reader.current["steps"].items()} == {"10": "10-a", "20": "20-b"}
    assert reader.current["generation"] == 2


def test_an_owner_whose_lock_was_deleted_uses_no_names_of_a_former_one(open_run):
    """The lock counts its owners from 1 again, while a stalled former owner may still write."""
    first, second = open_run(), open_run()
    first.take_over(1)
    second.take_over(1)
    (first.folder / "metrics.jsonl").write_text("stalled\n")
    first._send("*")
    assert (first.current["files"], second.current["files"]) == ("files-1", "files-2")
    assert second.current["generation"] == 2
    reader = open_run()
    reader.pull()
    assert not list(reader.folder.iterdir())


def test_files_of_former_owners_are_removed(open_run):
    for token in (1, 2, 3):
        run = open_run()
        run.take_over(token)
        (run.folder / "plan.json").write_text(json.dumps(token))
        run.push()
    assert sorted(info.key for info in run.store.list()) == ["current.json", "files-3/plan.json"]


def test_files_that_a_killed_owner_has_left_are_removed_by_the_next(open_run):
    run = open_run()
    run.store.write("files-1/plan.json", b"left")
    run.take_over(3)
    run.push()
    run.store.write("files-9/plan.json", b"of a later owner")
    run = open_run()
    run.take_over(4)
    assert sorted(info.key for info in run.store.list()) == ["current.json", "files-9/plan.json"]


@pytest.mark.parametrize("open_run", ["s3"], indirect=True)
def test_listings_that_lag_behind_lose_no_file(open_run, s3_server, monkeypatch):
    run = open_run()
    run.take_over(1)
    for name in ("recipe.toml", "metrics.jsonl"):
        (run.folder / name).write_text(name)
    run.push()
    with FaultyProxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        lag = proxy.inject(Fault("lag", times=-1, method="GET"))
        second = open_run()
        second.take_over(2)
        assert sorted(path.name for path in second.folder.iterdir()) == ["metrics.jsonl", "recipe.toml"]
        assert lag.hits
    assert {info.key.split("/")[0] for info in run.store.list()} == {"current.json", "files-2"}


def test_a_file_that_was_removed_since_it_was_named_is_not_missed(open_run):
    run = open_run()
    run.take_over(1)
    (run.folder / "plan.json").write_text("{}")
    run.push()
    run.store.delete("files-1/plan.json")
    other = open_run()
    other.pull()
    assert not list(other.folder.iterdir())


def test_what_never_counted_is_deleted_and_what_was_moved_aside_is_not(open_run):
    run = open_run()
    run.take_over(1)
    for key in ("10-a", "20-a", "30-a"):
        run.store.write(f"checkpoints/{key}/manifest.json", b"{}")
    run.commit(add(10, "10-a"))
    run.commit(lambda current: current["aside"].update({"damaged/20-a": "20-a"}))
    run.delete_leftovers()
    assert run.store.list_folder("checkpoints").folders == ("10-a", "20-a")


def test_keys_that_lead_out_of_the_copy_are_not_written(open_run, tmp_path):
    run = open_run()
    run.take_over(1)
    run.store.write("files-1/good.txt", b"1")
    client = run.store
    listed = [*client.list("files-1"), type(next(client.list("files-1")))("files-1/../../evil.txt", 1, "")]
    client.list = lambda prefix="": iter(listed)
    run.pull()
    assert [path.name for path in run.folder.iterdir()] == ["good.txt"]
    assert not (tmp_path / "evil.txt").exists()


def test_a_bucket_that_does_not_exist_is_one_sentence(bucket):
    with pytest.raises(UserError, match=r"^cannot read s3://nowhere-at-all/run: there is no such bucket"):
        buckets.resolve_folder("s3://nowhere-at-all/run")
    with pytest.raises(UserError, match=r"--run ftp://host/run: ftp:// is not supported"):
        buckets.resolve_folder("ftp://host/run")


def test_a_folder_with_objects_that_are_no_runs_is_refused_and_keeps_them(open_run):
    run = open_run()
    run.store.write("checkpoints/mine/weights.bin", b"1")
    with pytest.raises(
        UserError, match=r"runs/one is not empty and holds no run \(it has checkpoints\); choose another"
    ):
        run.take_over(1)
    assert run.store.read("checkpoints/mine/weights.bin") == b"1"


def test_a_first_start_that_was_killed_is_no_obstacle(open_run):
    run = open_run()
    run.store.write("lock.json", b"{}")
    run.store.write("files-1/recipe.toml", b"half")
    run.take_over(2)
    assert list(run.folder.iterdir()) == []


def test_a_url_without_a_run_is_named_as_the_user_wrote_it(bucket):
    with pytest.raises(UserError, match=rf"^there is no run in s3://{bucket}/none: it has no recipe.toml"):
        Run.load(f"s3://{bucket}/none")
