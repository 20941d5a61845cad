"""Training from a bucket: the same bits as from disk, on one process and on several, through a store with faults."""

import numpy as np
import pytest
from support import photos
from support.buckets import upload_folder
from support.faulty_proxy import Fault, FaultyProxy
from support.processes import (
    PROGRAM,
    find_free_port,
    read_losses,
    read_state,
    start,
    train_in_process,
    wait_for_exit,
)

from podscale.data.tools.prepare import Settings, prepare_data_set
from podscale.storage.open import open_store

SETTINGS = (
    "digits --data.source tar --data.image_size 16 --data.lanes 1 --augment.crop resized --augment.flip true "
    "--model.width 8 --model.precision float64 --batch.size 16 --batch.span 8 --train.epochs 3 --train.eval_epochs 3"
).split()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data set of 48 photos in tars, as `podscale data prepare` writes it."""
    source = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 32), ("val", 16)):
        for i in range(count):
            photos.save_image(source / "folder" / split / "abcd"[i % 4] / f"{i}.jpg", i, 40 + i, 60 - i, quality=90)
    prepare_data_set(source / "folder", source / "tars", Settings())
    return source / "tars"


@pytest.fixture
def url(s3_server, bucket, root, tmp_path, monkeypatch):
    """The data set in a bucket behind a store that fails every seventh request; nothing is cached yet."""
    upload_folder(root, s3_server, bucket, "photos")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with FaultyProxy(s3_server) as proxy:
        numbers = iter(range(10**9))
        proxy.inject(Fault("reset", times=-1, method="GET", matches=lambda *_: next(numbers) % 7 == 3))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield f"s3://{bucket}/photos"


def assert_same_bits(folder, other):
    assert read_losses(folder) == read_losses(other)
    one, two = read_state(folder), read_state(other)
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], name)


@pytest.mark.heavy
def test_training_from_a_bucket_ends_with_the_same_bits_as_from_disk(root, url, tmp_path):
    for name, path in (("disk", root), ("bucket", url)):
        train_in_process(tmp_path / name, "1x2", [*SETTINGS, "--data.path", str(path)])
    assert_same_bits(tmp_path / "bucket", tmp_path / "disk")


@pytest.mark.heavy
def test_training_from_an_azure_container_ends_with_the_same_bits_as_from_disk(root, container, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = open_store(f"az://{container}/photos")
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        store.write_file(path.relative_to(root).as_posix(), path)
    for name, path in (("disk", root), ("bucket", store.location)):
        train_in_process(tmp_path / name, "1x2", [*SETTINGS, "--data.path", str(path)])
    assert_same_bits(tmp_path / "bucket", tmp_path / "disk")


@pytest.mark.slow
@pytest.mark.processes(4)
def test_four_processes_without_a_shared_cache_train_the_same_from_a_bucket(root, url, tmp_path):
    for key in (".podscale-index", "prepare.json"):
        open_store(url).delete(key)  # tars that nobody has prepared
    for name, path in (("disk", root), ("bucket", url)):
        join = ["--coordinator", f"127.0.0.1:{find_free_port()}", "--processes", "4", "--process"]
        command = [
            *PROGRAM,
            "train",
            *SETTINGS,
            "--data.path",
            str(path),
            "--run",
            tmp_path / name,
            "--pod.shape",
            "2x2",
        ]
        processes = [start([*command, *join, i], XDG_CACHE_HOME=str(tmp_path / f"cache-{name}-{i}")) for i in range(4)]
        codes, outputs = wait_for_exit(processes)
        assert codes == [0] * 4, outputs[0][1][-3000:]
    assert_same_bits(tmp_path / "bucket", tmp_path / "disk")
    assert len(list(tmp_path.glob("cache-bucket-*/podscale/data/*/train-*.pack"))) >= 2
    assert len(list(tmp_path.glob("cache-bucket-*/podscale/index/*"))) == 1  # only one process indexes
