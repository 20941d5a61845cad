"""Data sets in buckets: the index is the one of the same data on disk, from listings and parts of objects alone."""

import json
import tarfile

import numpy as np
import pytest
from support import writers
from support.buckets import upload_folder
from support.faulty_proxy import Fault, FaultyProxy
from support.prepared import assert_same_samples, open_data_set
from support.tables import is_same_table

from podscale.cli.main import main
from podscale.data.index.bucket_index import BucketIndex, open_folder
from podscale.data.index.catalog import detect_kind, open_files
from podscale.data.tools.check import check_data_set
from podscale.errors import StorageError, UserError
from podscale.storage.open import open_store

WRITERS = {
    "folder": writers.write_folder,
    "tar": writers.write_tar,
    "tfrecord": writers.write_tfrecord,
    "parquet": writers.write_parquet,
}


@pytest.fixture
def proxy(s3_server, bucket, monkeypatch):
    """A proxy that counts requests, and that the environment points at."""
    with FaultyProxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy


def upload(kind, tmp_path, s3_server, bucket):
    root = WRITERS[kind](tmp_path / kind)
    upload_folder(root, s3_server, bucket, "data")
    return root, f"s3://{bucket}/data"


@pytest.mark.parametrize("kind", WRITERS)
def test_every_container_gives_the_index_and_the_pixels_of_the_same_data_on_disk(kind, tmp_path, s3_server, bucket):
    root, url = upload(kind, tmp_path, s3_server, bucket)
    assert detect_kind(open_folder(url)) == kind
    ours, theirs = open_data_set(url, kind), open_data_set(root, kind)
    assert ours.digest() == theirs.digest()
    assert_same_samples(ours, theirs)


def test_class_folders_without_splits_are_split_alike(tmp_path, s3_server, bucket):
    root = writers.write_folder(tmp_path / "folder") / "train"
    upload_folder(root, s3_server, bucket)
    assert_same_samples(open_data_set(f"s3://{bucket}", "folder"), open_data_set(root, "folder"))


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_an_index_is_stored_by_etags_and_made_again_when_an_object_changes(kind, tmp_path, s3_server, bucket, proxy):
    root, url = upload(kind, tmp_path, s3_server, bucket)
    first = open_data_set(url, kind)
    before = proxy.count("GET")
    assert open_data_set(url, kind).digest() == first.digest()
    listings = sum("list-type" in path for _, path in proxy.requests[before:])
    assert proxy.count("GET") - before == listings  # nothing but listings
    name = next(path for path in sorted(root.rglob("*")) if path.is_file()).relative_to(root).as_posix()
    open_store(url).write(name, writers.make_image(77) if kind == "folder" else (root / "val-000.tar").read_bytes())
    assert open_data_set(url, kind).digest() != first.digest()


def test_images_are_not_fetched_to_index_shards(tmp_path, s3_server, bucket, proxy):
    """A shard of large images is walked through by its headers."""
    root = tmp_path / "tar"
    root.mkdir()
    large = [writers.make_image(i) + bytes(300_000) for i in range(6)]  # trailing bytes are part of the file
    for split in ("train", "val"):
        with tarfile.open(root / f"{split}-0.tar", "w") as tar:
            for i, data in enumerate(large):
                writers.add_member(tar, f"{i % 2}/{i}.jpg", data)
    upload_folder(root, s3_server, bucket)
    store = open_store(f"s3://{bucket}")
    folder = open_folder(f"s3://{bucket}")
    open_files("tar", folder)
    requests = folder.store.requests
    assert requests["get"] <= 2 * 6 + 4
    assert sum(info.size for info in store.list()) > 3_000_000


def test_shards_of_small_images_are_indexed_by_few_requests(tmp_path, s3_server, bucket, proxy):
    root = tmp_path / "tars"
    root.mkdir()
    for split, count in (("train", 300), ("val", 2)):
        with tarfile.open(root / f"{split}-0.tar", "w") as tar:
            for i in range(count):
                writers.add_member(tar, f"{i % 2}/{i}.jpg", writers.make_image(i % 3))
    assert (root / "train-0.tar").stat().st_size > 2**18
    upload_folder(root, s3_server, bucket, "data")
    before = proxy.count("GET")
    ours = open_data_set(f"s3://{bucket}/data")
    assert proxy.count("GET") - before < 16  # listings, and pages that double from 8 KiB on
    theirs = open_data_set(root)
    assert is_same_table(ours.train.files.table, theirs.train.files.table)
    assert is_same_table(ours.val.files.table, theirs.val.files.table)
    assert all(ours.train.read(i) == theirs.train.read(i) for i in (0, 150, 299))


def test_one_process_indexes_and_the_others_ask_for_nothing(tmp_path, s3_server, bucket, proxy):
    _, url = upload("tar", tmp_path, s3_server, bucket)
    sent = []

    def send(make):
        sent.append(make())
        return sent[0]

    train, val, classes, _ = open_files("tar", open_folder(url), share=send)
    before = len(proxy.requests)
    others = open_files("tar", open_folder(url), share=lambda make: sent[0])
    assert len(proxy.requests) == before
    assert np.array_equal(others[0].table.offsets, train.table.offsets)
    assert others[2] == classes
    assert others[1].read(0) == val.read(0)
    assert BucketIndex.parse(sent[0]).format() == sent[0]


def test_a_replaced_object_is_refused(tmp_path, s3_server, bucket):
    root, url = upload("tar", tmp_path, s3_server, bucket)
    data = open_data_set(url)
    open_store(url).write("train-000.tar", (root / "train-000.tar").read_bytes()[::-1])
    with pytest.raises(StorageError, match=r"train-000.tar: it was replaced after it was indexed"):
        data.train.read(0)


def test_a_store_that_refuses_is_named_and_no_image_is_blamed(tmp_path, s3_server, bucket, proxy):
    _, url = upload("tar", tmp_path, s3_server, bucket)
    proxy.inject(Fault("status", status=403, times=-1))
    for ask in (lambda: detect_kind(open_folder(url)), lambda: check_data_set(url, "tar")):
        with pytest.raises(StorageError, match="refuses access"):
            ask()


def test_missing_buckets_and_folders_are_named(bucket):
    with pytest.raises(UserError, match=f"there is no folder s3://{bucket}/nothing"):
        detect_kind(open_folder(f"s3://{bucket}/nothing"))
    with pytest.raises(UserError, match="s3://no-such-bucket/x: there is no such bucket"):
        detect_kind(open_folder("s3://no-such-bucket/x"))


def test_the_commands_index_and_check_take_a_bucket(tmp_path, s3_server, bucket, capfd):
    _, url = upload("folder", tmp_path, s3_server, bucket)
    assert main(["data", "index", url, "--json"]) == 0
    survey = json.loads(capfd.readouterr().out)
    assert (survey["source"], survey["splits"]["train"]["images"]) == ("folder", 12)
    assert main(["data", "check", url, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["clean"]


def test_prepare_goes_from_bucket_to_bucket(tmp_path, s3_server, bucket, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root, url = upload("folder", tmp_path, s3_server, bucket)
    target = f"s3://{bucket}/prepared"
    assert main(["data", "prepare", url, target]) == 0
    assert_same_samples(open_data_set(target), open_data_set(root, "folder"))
    assert {info.key for info in open_store(target).list()} == {
        ".podscale-index",
        "classes.txt",
        "prepare.json",
        "train-00000.tar",
        "val-00000.tar",
    }
    assert not list((tmp_path / "cache" / "podscale" / "prepare").iterdir())
    assert main(["data", "prepare", url, target, "--longest", "20"]) == 2  # other settings
    assert main(["data", "prepare", url, url]) == 2  # not empty


@pytest.mark.heavy
def test_a_data_set_whose_upload_was_cut_off_is_refused(tmp_path, s3_server, bucket, proxy, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, url = upload("folder", tmp_path, s3_server, bucket)
    target = f"s3://{bucket}/prepared"
    fault = proxy.inject(Fault("status", status=403, times=-1, method="PUT", path="val-00000.tar"))
    assert main(["data", "prepare", url, target]) == 2
    with pytest.raises(UserError, match="is only partly prepared"):
        open_data_set(target)
    fault.times = fault.hits
    assert main(["data", "prepare", url, target]) == 0
    assert len(open_data_set(target).train) == 12


@pytest.mark.heavy
def test_a_finished_data_set_in_a_bucket_is_neither_written_again_nor_replaced_by_another(
    tmp_path, s3_server, bucket, proxy, monkeypatch, capfd
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root, url = upload("folder", tmp_path, s3_server, bucket)
    target = f"s3://{bucket}/prepared"
    assert main(["data", "prepare", url, target, "--json"]) == 0
    first = json.loads(capfd.readouterr().out)
    before, writes = sorted(open_store(target).list(), key=lambda info: info.key), proxy.count("PUT")

    assert main(["data", "prepare", url, target, "--json"]) == 0
    again = json.loads(capfd.readouterr().out)
    assert (first.pop("already"), again.pop("already")) == (False, True)
    assert first | {"seconds": 0} == again | {"seconds": 0}

    next(root.rglob("00.jpg")).unlink()  # the source on disk is other data now
    assert main(["data", "prepare", str(root), target]) == 2
    assert f"{target} was started from other data, or it has changed since" in capfd.readouterr().err
    assert sorted(open_store(target).list(), key=lambda info: info.key) == before
    assert proxy.count("PUT") == writes

    open_store(target).delete("val-00000.tar")  # lost since
    assert main(["data", "prepare", url, target]) == 0
    assert {info.key for info in open_store(target).list()} == {info.key for info in before}
