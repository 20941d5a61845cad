"""Stores: a local folder, a bucket on a real S3 server and a container on a real Azure server behave alike.

So does `gs://`, on a proxy that translates Google's protocol to S3's (`support.google`): no server of it was available.
"""

import os
import subprocess
import sys
import threading

import pytest
from support.faulty_proxy import FaultyProxy

from podscale.errors import UserError
from podscale.storage.locations import Location
from podscale.storage.open import open_store
from podscale.storage.store import ObjectChangedError, make_token

NAMES = ["a.jpg", "my cat.jpg", "50% off#1?.jpg", "größe+=&.txt", "deep/er/x.y.z"]


@pytest.fixture(params=["local", "s3", "gs", "az", pytest.param("ceph", marks=pytest.mark.slow)])
def store(request, tmp_path):
    if request.param == "local":
        return open_store(tmp_path / "root")
    if request.param == "az":
        return open_store(f"az://{request.getfixturevalue('container')}/some/folder")
    if request.param == "gs":
        return open_store(f"gs://{request.getfixturevalue('google_bucket')}/some/folder")
    name = {"s3": "bucket", "ceph": "ceph_bucket"}[request.param]
    return open_store(f"s3://{request.getfixturevalue(name)}/some/folder")


def test_what_is_written_is_read_in_whole_and_in_ranges(store):
    data = os.urandom(300_000)
    etag = store.write("shard.tar", data)
    assert store.read("shard.tar") == data
    assert store.read("shard.tar", etag) == data
    assert store.read_range("shard.tar", 1000, 200_000, etag) == data[1000:200_000]
    ranges = [(299_999, 300_000), (0, 10), (5, 5), (10, 20), (100_000, 100_001)]
    assert [bytes(part) for part in store.read_ranges("shard.tar", ranges, etag)] == [data[a:b] for a, b in ranges]
    info = store.stat("shard.tar")
    assert (info.key, info.size, info.etag) == ("shard.tar", 300_000, etag)
    assert list(store.list()) == list(store.list_folder().objects) == [info]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_written_listed_and_read(store, name):
    store.write(name, b"content")
    assert [info.key for info in store.list()] == [name]
    assert store.read(name) == b"content"


def test_lists_all_objects_below_a_folder_or_its_entries_alone(store):
    for key in ("train/a/1.jpg", "train/a/2.jpg", "train/b/1.jpg", "train.txt", "trains/x"):
        store.write(key, key.encode())
    assert sorted((info.key, info.size) for info in store.list("train")) == [
        (key, len(key)) for key in ("train/a/1.jpg", "train/a/2.jpg", "train/b/1.jpg")
    ]
    root = store.list_folder()
    assert (root.folders, [info.key for info in root.objects]) == (("train", "trains"), ["train.txt"])
    assert store.list_folder("train").folders == ("a", "b")
    assert [info.key for info in store.list_folder("train/a").objects] == ["train/a/1.jpg", "train/a/2.jpg"]
    assert store.list_folder("nothing") == store.list_folder("train/nothing")
    assert list(store.list("nothing")) == []


def test_a_missing_object_and_a_range_past_the_end_are_named(store):
    with pytest.raises(FileNotFoundError) as caught:
        store.read("no/such.jpg")
    assert caught.value.filename.endswith("no/such.jpg")
    store.write("short", b"abc")
    with pytest.raises(OSError, match="ends before byte 10") as caught:
        store.read_range("short", 0, 10)
    assert caught.value.filename.endswith("short")


def test_creating_refuses_an_object_that_is_there(store):
    store.create("lock", b"mine")
    with pytest.raises(FileExistsError):
        store.create("lock", b"yours")
    assert store.read("lock") == b"mine"


def test_updating_refuses_an_object_that_has_changed(store):
    first = store.write("state", b"one")
    second = store.update("state", b"two", first)
    with pytest.raises(ObjectChangedError):
        store.update("state", b"three", first)
    with pytest.raises(ObjectChangedError):
        store.read("state", first)
    assert store.read("state", second) == b"two"


def test_of_many_that_create_or_update_one_wins(store):
    def race(act):
        winners, barrier = [], threading.Barrier(8)

        def compete(token):
            barrier.wait()
            try:
                act(token.encode())
                winners.append(token)
            except (FileExistsError, ObjectChangedError):
                pass

        threads = [threading.Thread(target=compete, args=(make_token(),)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [store.read("contested").tobytes().decode()] == winners

    race(lambda data: store.create("contested", data))
    etag = store.stat("contested").etag
    race(lambda data: store.update("contested", data, etag))


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_a_bucket_that_is_not_there_is_named_as_such(scheme, request):
    request.getfixturevalue({"s3": "bucket", "az": "container"}[scheme])
    store = open_store(f"{scheme}://nobody-has-this/folder")
    for act in (lambda: store.write("x", b"1"), store.list_folder):
        with pytest.raises(FileNotFoundError, match="there is no such bucket") as caught:
            act()
        assert caught.value.filename.startswith(f"{scheme}://nobody-has-this")


def test_deleting_needs_no_object(store):
    store.write("x", b"1")
    store.delete("x")
    store.delete("x")
    assert list(store.list()) == []


def test_a_large_file_is_written_in_parts(store, tmp_path):
    path = tmp_path / "large"
    path.write_bytes(os.urandom(17 * 2**20))
    store.write_file("large", path)
    assert store.read("large") == path.read_bytes()


def test_a_local_key_leads_nowhere_else(tmp_path):
    store = open_store(tmp_path)
    for key in ("../x", "a/../../x", "/etc/passwd"):
        with pytest.raises(OSError, match="must not lead out"):
            store.read(key)


def test_schemes_that_are_not_supported_are_refused_and_make_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("ftp://host/x", "hdfs://x/y", "s4:/x"):
        with pytest.raises(UserError, match="not supported"):
            open_store(text)
    with pytest.raises(UserError, match="names no bucket"):
        open_store("s3://")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_pathlib_has_shortened_is_still_a_bucket():
    from pathlib import Path

    assert open_store(Path("s3://bucket/run")).location == Location("s3", "bucket", "run")


def test_without_obstore_a_sentence_says_what_to_install(tmp_path):
    program = (
        "import sys; sys.modules['obstore'] = None\n"
        "from podscale.errors import UserError\n"
        "from podscale.storage.open import open_store\n"
        "open_store('runs')\n"
        "try: open_store('s3://bucket/run')\n"
        "except UserError as error: print(error)\n"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output == "s3://bucket/run needs obstore; install it: pip install 'podscale[cloud]'\n"


def test_a_web_server_is_read_and_never_written(s3_server, bucket):
    open_store(f"s3://{bucket}").write("folder/x", b"public")
    with FaultyProxy(s3_server) as web_server:
        store = open_store(f"{web_server.address}/{bucket}/folder")
        assert store.read("x", store.stat("x").etag) == b"public"
        assert store.read_range("x", 1, 3) == b"ub"
        with pytest.raises(PermissionError, match="only read from"):
            store.write("y", b"")


FORK_PROGRAM = """
import os, sys
from podscale.errors import UserError
from podscale.storage.open import open_store
store = open_store(sys.argv[1])
store.write("x", b"1")
child = os.fork()
if child == 0:
    try:
        store.read("x")
    except UserError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(bytes(store.read("x")))
"""


def test_a_forked_child_is_refused_rather_than_left_hanging(bucket):
    command = [sys.executable, "-c", FORK_PROGRAM, f"s3://{bucket}"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    refusal, parent = output.splitlines()
    assert refusal.startswith(f"s3://{bucket}/x cannot be read in a forked process")
    assert parent == "b'1'"
