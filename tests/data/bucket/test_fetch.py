"""Samples fetched from a bucket ahead of time: batches are those from disk, bit for bit, under faults, too."""

import os
import tarfile
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import photos, writers
from support.buckets import upload_folder
from support.faulty_proxy import Fault, FaultyProxy
from support.loader_threads import no_loader_thread_left  # noqa: F401 (a fixture)
from support.prepared import open_data_set

from podscale.config.options import Options
from podscale.data.bucket import fetch, requests
from podscale.data.bucket import window as fetch_window
from podscale.data.bucket import workers as fetch_workers
from podscale.data.bucket.disk_cache import LIMIT_VARIABLE, DiskCache, explain_missing_cache, open_disk_cache
from podscale.data.loader import load_eval_batches, load_train_batches
from podscale.data.tools.prepare import Settings, prepare_data_set
from podscale.errors import StorageError
from podscale.plan import Counts, make_plan
from podscale.pod import Pod
from podscale.recipe import Recipe, override_recipe
from podscale.storage.open import open_store
from podscale.training.advice import list_warnings

IMAGES, BATCH, STEPS = 24, 8, 12  # four passes

pytestmark = pytest.mark.usefixtures("no_loader_thread_left")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Tars of JPEGs of natural proportions, and some images that the native decoder leaves to the reference."""
    root = tmp_path_factory.mktemp("photos")
    for number, split in enumerate(("train", "val")):
        for i in range(IMAGES):
            extension = "png" if i % 7 == 3 else "jpg"
            photos.save_image(root / "files" / split / f"{i}.{extension}", 100 * number + i, 60 + 3 * i, 90 - 2 * i)
        for shard in range(2):
            with tarfile.open(root / f"{split}-{shard}.tar", "w") as tar:
                for path in sorted((root / "files" / split).iterdir())[shard::2]:
                    writers.add_member(tar, f"{'ab'[int(path.stem) % 2]}/{path.name}", path.read_bytes())
    return root


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "podscale" / "data"


@pytest.fixture
def proxy(s3_server, bucket, root, own_cache, monkeypatch):
    for path in root.glob("*.tar"):
        upload_file(s3_server, bucket, path)
    with FaultyProxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy


def upload_file(s3_server, bucket, path):
    open_store(f"s3://{bucket}").write(path.name, path.read_bytes())


def make_batches(splits, *, steps=STEPS, devices=2):
    """Return the images and labels of a short training and of an evaluation."""
    changes = {"data.image_size": 16, "data.lanes": 1, "batch.size": BATCH, "batch.span": 4}
    recipe = override_recipe(Recipe(), changes)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("devices",))
    pod = Pod("cpu", 1, devices, devices=tuple(jax.devices()[:devices]))
    plan = make_plan(recipe, pod, Counts(len(splits.train), len(splits.val), 2), Options(steps_per_call=1))
    ranges = [range(step, step + 1) for step in range(steps)]
    sharding = NamedSharding(mesh, P(None, None, "devices"))
    with load_train_batches(splits.train, plan, ranges, sharding) as batches:
        result = [np.asarray(array) for batch in batches for array in (batch.images, batch.labels)]
    with load_eval_batches(splits.val, recipe, NamedSharding(mesh, P("devices")), 5) as batches:
        result += [np.asarray(array) for batch in batches for array in (batch.images, batch.labels)]
    return result


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_batches_from_a_bucket_are_those_from_disk(root, bucket, proxy):
    theirs = make_batches(open_data_set(root))
    assert_same(make_batches(open_data_set(f"s3://{bucket}")), theirs)


def test_a_second_pass_and_a_restart_ask_the_bucket_for_nothing(root, bucket, proxy, own_cache):
    first = make_batches(open_data_set(f"s3://{bucket}"), steps=3)  # one pass
    splits = open_data_set(f"s3://{bucket}")
    before = proxy.count("GET")
    assert_same(make_batches(splits)[: 2 * 3], first[: 2 * 3])
    assert proxy.count("GET") == before
    assert len(list(own_cache.glob("*/train-*.pack"))) == 1


def test_what_another_process_has_fetched_meanwhile_is_not_fetched_again(root, bucket, proxy, own_cache):
    ours, theirs = open_data_set(f"s3://{bucket}"), open_data_set(f"s3://{bucket}")
    cache = ours.train.files.open_cache()  # an earlier process's, in which nothing is yet
    assert (cache.count(), ours.val.files.open_cache().count()) == (0, 0)
    batches = make_batches(theirs, steps=3)
    with next(own_cache.glob("*/train-*.entries")).open("ab") as file:
        file.write(bytes(7))  # an entry that is being written
    before = proxy.count("GET")
    assert_same(make_batches(ours, steps=3), batches)
    assert proxy.count("GET") == before
    assert len(list(own_cache.glob("*/*.pack"))) == 2  # one a split


def test_a_restart_verifies_a_cached_sample_only_when_a_batch_needs_it(root, bucket, proxy, monkeypatch):
    make_batches(open_data_set(f"s3://{bucket}"), steps=3)
    monkeypatch.setattr(fetch, "AHEAD_SAMPLES", 2 * BATCH)
    batches, is_third = np.arange(IMAGES).reshape(3, BATCH), threading.Event()
    looked_at = []  # by the thread ahead, with the number of batches finished then

    def list_batches():
        for number, batch in enumerate([*batches] * 3):
            if number == 2:
                is_third.set()
            looked_at.append((number, finished))
            yield batch

    finished, files = 0, open_data_set(f"s3://{bucket}").train.files
    cache = files.open_cache()
    ahead = fetch.FetchAhead(files, list_batches)
    is_third.wait(20)
    assert cache.count() == IMAGES
    assert not cache._is_verified.any()
    looked_at.clear()  # what was looked at when it began
    for number in range(4):
        files.locate_bytes(batches[number % 3])
        assert cache._is_verified.sum() == BATCH * min(number + 1, 3)
        finished = number + 1
        ahead.finish_batch()
    ahead.close()
    assert all(number <= finished + 2 for number, finished in looked_at)


def test_a_damaged_cache_is_noticed_and_fetched_again(root, bucket, proxy, own_cache):
    theirs = make_batches(open_data_set(root))
    make_batches(open_data_set(f"s3://{bucket}"))
    (pack,) = own_cache.glob("*/train-*.pack")
    with pack.open("r+b") as file:
        file.seek(500)
        file.write(bytes(3000))
        file.truncate(pack.stat().st_size - 100)
    (entries,) = own_cache.glob("*/val-*.entries")
    entries.write_bytes(os.urandom(333) + entries.read_bytes()[333:])
    before = proxy.count("GET")
    assert_same(make_batches(open_data_set(f"s3://{bucket}")), theirs)
    assert 0 < proxy.count("GET") - before < 2 * IMAGES


def test_data_sets_that_differ_in_nothing_but_pixels_do_not_share_a_cache(tmp_path, s3_server, bucket, own_cache):
    """Their index is beside them and holds the same names, lengths and classes."""
    for number, name in enumerate(("one", "two")):
        for split in ("train", "val"):
            for i in range(IMAGES):
                photos.save_image(tmp_path / "from" / name / split / "ab"[i % 2] / f"{i}.png", 50 * number + i, 20, 20)
        prepare_data_set(tmp_path / "from" / name, tmp_path / name, Settings(raw=True))
        upload_folder(tmp_path / name, s3_server, bucket, name)
    for name in ("one", "two"):
        assert_same(make_batches(open_data_set(f"s3://{bucket}/{name}")), make_batches(open_data_set(tmp_path / name)))
    upload_folder(tmp_path / "two", s3_server, bucket, "one")  # prepared again
    assert_same(make_batches(open_data_set(f"s3://{bucket}/one")), make_batches(open_data_set(tmp_path / "two")))
    assert len(list(own_cache.iterdir())) == 3


def test_a_limited_or_missing_cache_changes_nothing(root, bucket, proxy, own_cache, monkeypatch):
    theirs = make_batches(open_data_set(root))
    monkeypatch.setenv(LIMIT_VARIABLE, "0.00001")  # ten kilobytes
    assert_same(make_batches(open_data_set(f"s3://{bucket}")), theirs)
    assert 0 < sum(path.stat().st_size for path in own_cache.glob("*/*.pack")) <= 10_738
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    before = proxy.count("GET")
    assert_same(make_batches(open_data_set(f"s3://{bucket}")), theirs)
    assert proxy.count("GET") > before


def test_the_oldest_data_set_that_nobody_uses_makes_space(tmp_path, own_cache):
    lengths, numbers = np.array([1000]), np.array([0])
    for name in ("old", "new"):
        cache = DiskCache(own_cache / name, "train", numbers, lengths, limit=10_000)
        assert cache.reserve(0, 1000)
        cache.write(0, memoryview(bytes(1000)))
        assert cache.find(0)
    os.utime(own_cache / "old", (1, 1))
    del cache
    from podscale.data.bucket.disk_cache import _remove_unused

    _remove_unused(own_cache, "mine", 1500)
    assert [path.name for path in own_cache.iterdir()] == ["new"]


def test_a_data_set_that_fits_beside_another_leaves_it_in_the_cache(own_cache, monkeypatch):
    lengths, numbers = np.array([1_000_000]), np.array([0])
    monkeypatch.setenv(LIMIT_VARIABLE, str(4_500_000 / 2**30))
    for _ in range(2):
        for name in ("one", "two"):
            for split in ("train", "val"):
                cache = open_disk_cache(name, split, numbers, lengths)
                if not cache.find(0):
                    assert cache.reserve(0, 1_000_000)
                    cache.write(0, memoryview(bytes(1_000_000)))
        assert sorted(path.name for path in own_cache.iterdir()) == ["one", "two"]
    monkeypatch.setenv(LIMIT_VARIABLE, str(3_500_000 / 2**30))
    open_disk_cache("two", "val", numbers, lengths)
    assert [path.name for path in own_cache.iterdir()] == ["two"]


def test_a_missing_cache_is_warned_of_with_its_reason(root, bucket, proxy, tmp_path, own_cache, monkeypatch):
    plan = SimpleNamespace(recipe=override_recipe(Recipe(), {"batch.size": BATCH, "batch.span": 4, "data.lanes": 1}))
    program = SimpleNamespace(data=open_data_set(f"s3://{bucket}"), plan=plan)
    assert list_warnings(program, {}, is_new=False) == []
    tmp_path.chmod(0o777)  # a volume that everybody can write to
    assert not explain_missing_cache()
    own_cache.chmod(0o777)
    (text,) = list_warnings(program, {}, is_new=False)
    assert text.endswith(f"so every epoch fetches all: other users can write to {own_cache}")
    assert open_disk_cache("one", "train", np.array([0]), np.array([1])) is None
    own_cache.rmdir()
    own_cache.write_text("no folder")
    assert explain_missing_cache() == f"cannot write {own_cache}: File exists"
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    own_cache.unlink()
    assert not explain_missing_cache()  # it is not to be


def test_packs_that_no_entry_can_be_read_of_are_removed_once_nobody_uses_them(own_cache):
    """An earlier version's entries are of another kind; a killed process may leave a pack without any."""
    lengths, numbers, folder = np.array([1000, 1000]), np.array([0, 1]), own_cache / "set"
    writer = DiskCache(folder, "train", numbers, lengths, limit=10_000)
    assert writer.reserve(0, 1000)
    writer.write(0, memoryview(bytes(1000)))
    for name in ("train-old", "val-old", "train-killed"):
        (folder / f"{name}.pack").write_bytes(bytes(2000))
    for name in ("train-old", "val-old"):
        (folder / f"{name}.entries").write_bytes(os.urandom(320))
    before = sorted(path.name for path in folder.iterdir())

    assert DiskCache(folder, "val", numbers, lengths, limit=10_000).count() == 0  # the writer still has the folder
    assert sorted(path.name for path in folder.iterdir()) == before
    del writer
    assert DiskCache(folder, "train", numbers, lengths, limit=10_000).find(0)
    assert sorted(path.name for path in folder.iterdir()) == [
        name for name in before if "old" not in name and "killed" not in name
    ]


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "status": 429},
        {"kind": "status", "status": 503},
        {"kind": "reset"},
        {"kind": "truncate"},
        {"kind": "short"},
        {"kind": "away"},
    ],
    ids=lambda fault: " ".join(map(str, fault.values())),
)
def test_faults_that_pass_change_no_pixel(root, bucket, proxy, fault):
    theirs = make_batches(open_data_set(root))
    splits = open_data_set(f"s3://{bucket}")
    every_fifth = iter(range(10**6))
    proxy.inject(Fault(times=-1, method="GET", matches=lambda *_: next(every_fifth) % 5 == 0, **fault))
    assert_same(make_batches(splits), theirs)


def test_a_slow_first_byte_is_asked_for_again(root, bucket, proxy, monkeypatch):
    monkeypatch.setattr(fetch_workers, "HEDGE_S", 0.2)
    theirs = make_batches(open_data_set(root))
    splits = open_data_set(f"s3://{bucket}")
    slow, before = proxy.inject(Fault("slow", seconds=3, times=1, method="GET")), proxy.count("GET")
    assert_same(make_batches(splits), theirs)
    assert slow.hits == 1
    assert proxy.count("GET") - before > 4  # four shards, and samples of the slow one


def test_an_object_replaced_during_the_run_ends_it_with_a_sentence(root, bucket, proxy):
    splits = open_data_set(f"s3://{bucket}")
    open_store(f"s3://{bucket}").write("train-1.tar", (root / "train-0.tar").read_bytes())
    with pytest.raises(StorageError, match=r"train-1.tar: it was replaced after it was indexed"):
        make_batches(splits)


def test_a_store_that_stays_away_ends_the_run_with_a_sentence(root, bucket, proxy, monkeypatch):
    monkeypatch.setenv("PODSCALE_STORE_RETRY_S", "0.5")
    splits = open_data_set(f"s3://{bucket}")
    proxy.inject(Fault("status", status=503, times=-1))
    with pytest.raises(StorageError, match="the store answers 503"):
        make_batches(splits)


def test_a_small_window_bounds_memory_and_changes_nothing(root, bucket, proxy, monkeypatch):
    theirs = make_batches(open_data_set(root))
    monkeypatch.setattr(fetch_window, "WINDOW_BYTES", 3000)  # less than one batch, about two images
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    assert_same(make_batches(open_data_set(f"s3://{bucket}")), theirs)


def test_neighbours_in_an_object_are_asked_for_at_once(root, bucket, proxy):
    files = open_data_set(f"s3://{bucket}").train.files
    spans = requests.plan_requests(files, range(IMAGES))
    assert len(spans) == 2  # two shards
    assert sorted(sample for span in spans for sample in span.samples) == list(range(IMAGES))
    for span in spans:
        data = files.fetch_range(span.where)
        for sample, (first, last) in zip(span.samples, span.bounds, strict=True):
            assert bytes(data[first:last]) == files.read(sample)


def test_shards_that_are_needed_whole_are_fetched_in_blocks(root, bucket, proxy, own_cache):
    theirs = make_batches(open_data_set(root))
    splits = open_data_set(f"s3://{bucket}")
    before = proxy.count("GET")
    assert_same(make_batches(splits), theirs)
    assert proxy.count("GET") - before == 4  # two shards for training, two to evaluate
    again = open_data_set(f"s3://{bucket}")
    before = proxy.count("GET")
    assert_same(make_batches(again), theirs)
    assert proxy.count("GET") == before


def test_single_samples_are_fetched_with_the_same_pixels(root, bucket, proxy, monkeypatch):
    theirs = make_batches(open_data_set(root))
    monkeypatch.setattr(requests, "MIN_DENSITY", 2.0)  # nothing is dense enough to be a block
    assert_same(make_batches(open_data_set(f"s3://{bucket}")), theirs)


@pytest.mark.parametrize("cache_gib", ["", "0"])
def test_a_sample_is_asked_for_once_however_late_the_thread_ahead_is(
    root, bucket, proxy, monkeypatch, cache_gib, own_cache
):
    monkeypatch.setattr(requests, "MIN_DENSITY", 2.0)
    monkeypatch.setattr(fetch_workers, "HEDGE_S", 600.0)  # no second request, however busy the machine is
    monkeypatch.setattr("podscale.storage.cloud.MERGE_GAP", -1)  # neighbours are not fetched together
    monkeypatch.setenv(LIMIT_VARIABLE, cache_gib)
    proxy.delay_s = 0.01
    pauses, enter = iter(np.random.default_rng(0).uniform(0, 0.1, 1000).tolist()), fetch_window.Window._enter

    def enter_late(self, samples, taken, is_over):
        time.sleep(next(pauses))
        new = enter(self, samples[:4], taken, is_over)
        time.sleep(next(pauses))
        return new + enter(self, samples[4:], taken, is_over)

    monkeypatch.setattr(fetch_window.Window, "_enter", enter_late)
    theirs = make_batches(open_data_set(root), steps=3)  # one pass
    splits = open_data_set(f"s3://{bucket}")
    before = proxy.count("GET")
    assert_same(make_batches(splits, steps=3), theirs)
    assert proxy.count("GET") - before == 2 * IMAGES


def test_blocks_are_dense_parts_of_one_shard(root, bucket, proxy, monkeypatch):
    monkeypatch.setattr(requests, "BLOCK_BYTES", 6000)
    files = open_data_set(f"s3://{bucket}").train.files
    blocks = requests.find_blocks(files, np.arange(IMAGES))
    assert len(blocks.members) > 2
    for number, members in enumerate(blocks.members):
        assert len(set(files.table.files[members].tolist())) == 1
        assert (blocks.numbers[members] == number).all()
        span = blocks.make_span(files, number)
        data = files.fetch_range(span.where)
        for sample, (first, last) in zip(span.samples, span.bounds, strict=True):
            assert bytes(data[first:last]) == files.read(sample)
    sparse = np.arange(0, IMAGES, 6)
    assert not requests.find_blocks(files, sparse).members


def test_a_cache_without_space_for_a_block_leaves_its_samples_to_later(root, bucket, proxy, own_cache, monkeypatch):
    theirs = make_batches(open_data_set(root))
    monkeypatch.setattr(DiskCache, "has_space", lambda self, size: size > 30_000)  # says yes to all, no to each
    assert_same(make_batches(open_data_set(f"s3://{bucket}")), theirs)


def test_a_class_folder_is_fetched_image_by_image(tmp_path, s3_server, bucket, own_cache):
    root = writers.write_folder(tmp_path / "folder")
    upload_folder(root, s3_server, bucket)
    theirs, ours = open_data_set(root, "folder"), open_data_set(f"s3://{bucket}", "folder")
    assert_same(make_batches(ours, steps=4), make_batches(theirs, steps=4))
