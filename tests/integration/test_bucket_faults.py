"""Trainings from and to a bucket whose store fails: they end with the bits of a run on disk, or with one sentence."""

import threading

import numpy as np
import pytest
from support import photos
from support.buckets import upload_folder
from support.faulty_proxy import Fault, FaultyProxy
from support.processes import PROGRAM, read_losses, read_state, start, train_in_process, wait_for_exit

from podscale.cli.main import main
from podscale.data.tools.prepare import Settings, prepare_data_set
from podscale.runs import bucket as buckets
from podscale.storage.open import open_store

SETTINGS = (
    "digits --data.source tar --data.image_size 16 --data.lanes 1 --augment.crop resized --augment.flip true "
    "--model.width 8 --model.precision float64 --batch.size 16 --batch.span 8 --train.epochs 6 --train.eval_epochs 3"
).split()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    source = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 32), ("val", 16)):
        for i in range(count):
            photos.save_image(source / "folder" / split / "abcd"[i % 4] / f"{i}.jpg", i, 40 + i, 60 - i, quality=90)
    prepare_data_set(source / "folder", source / "tars", Settings())
    return source / "tars"


@pytest.fixture(scope="module")
def on_disk(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk") / "run"
    train_in_process(folder, "1x2", [*SETTINGS, "--data.path", str(root)])
    return folder


@pytest.fixture
def proxy(s3_server, bucket, root, tmp_path, monkeypatch):
    """A proxy before a bucket with the data; no process has opened a run there yet, and every pass is fetched."""
    upload_folder(root, s3_server, bucket, "photos")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PODSCALE_DISK_CACHE_GIB", "0")
    monkeypatch.setattr(buckets, "_buckets", {})
    with FaultyProxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy


def assert_same_bits(url, folder, monkeypatch):
    monkeypatch.setattr(buckets, "_buckets", {})
    assert read_losses(url) == read_losses(folder)
    ours, theirs = read_state(url), read_state(folder)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], name)


FAULTS = {
    "429": {"kind": "status", "status": 429},
    "503": {"kind": "status", "status": 503},
    "reset": {"kind": "reset"},
    "truncated": {"kind": "truncate"},
    "short": {"kind": "short", "method": "GET"},
    "long": {"kind": "long", "method": "GET"},
    "slow": {"kind": "slow", "seconds": 1.5},
    "lost answer": {"kind": "lost answer", "method": "PUT"},
    "lagging listing": {"kind": "lag", "method": "GET", "path": "runs"},
}


def inject_every(proxy, number, **fault):
    counter = iter(range(10**9))
    return proxy.inject(Fault(times=-1, matches=lambda *_: next(counter) % number == number // 2, **fault))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", *FAULTS])
def test_a_training_from_and_to_a_failing_bucket_has_the_bits_of_one_on_disk(proxy, bucket, on_disk, monkeypatch, name):
    faults = FAULTS if name == "all" else {name: FAULTS[name]}
    every = {"all": 23, "lagging listing": 1}.get(name, 5)  # a run makes few listings
    injected = [inject_every(proxy, every, **fault) for fault in faults.values()]
    url = f"s3://{bucket}/runs/one"
    train_in_process(url, "1x2", [*SETTINGS, "--data.path", f"s3://{bucket}/photos"])
    proxy.clear()
    assert sum(fault.hits for fault in injected) > 3
    assert_same_bits(url, on_disk, monkeypatch)
    names = {info.key.split("/")[2] for info in open_store(f"s3://{bucket}").list("runs")}
    assert names == {"lock.json", "current.json", "files-1", "checkpoints"}


def start_training(bucket, folder, *more):
    words = [*SETTINGS, "--data.path", f"s3://{bucket}/photos", "--run", f"s3://{bucket}/runs/one"]
    return start([*PROGRAM, "train", *words, "--pod.virtual", "1x2", *more], TMPDIR=str(folder), HOME=str(folder))


def wait_for_requests(proxy, process, method, path, count=1):
    """Wait until so many requests were made; fail if the process ends first."""
    while proxy.count(method, path) < count:
        assert process.poll() is None, process.communicate()[1][-3000:]
        threading.Event().wait(0.02)


@pytest.mark.slow
def test_a_store_that_is_away_for_a_minute_is_waited_for(proxy, bucket, on_disk, tmp_path, monkeypatch):
    process = start_training(bucket, tmp_path)
    wait_for_requests(proxy, process, "PUT", "/checkpoints/")
    away = proxy.inject(Fault("away", times=-1))
    threading.Timer(60, proxy.clear).start()
    ((code,), ((_, errors),)) = wait_for_exit([process])
    assert code == 0, errors[-3000:]
    assert away.hits
    assert_same_bits(f"s3://{bucket}/runs/one", on_disk, monkeypatch)


def read_sentence(errors):
    (line,) = [line for line in errors.splitlines() if line.startswith("podscale: ")]
    assert "Traceback" not in errors
    return line


@pytest.mark.slow
@pytest.mark.parametrize("status", [400, 403])
def test_credentials_that_expire_during_a_run_end_it_with_a_sentence_and_new_ones_resume_it(
    proxy, bucket, on_disk, tmp_path, monkeypatch, status
):
    process = start_training(bucket, tmp_path, "--plan.save_steps", 2)
    wait_for_requests(proxy, process, "PUT", "/checkpoints/", 4)  # the first checkpoint has two files, and is committed
    proxy.inject(Fault("status", status=status, code="ExpiredToken", times=-1))
    ((code,), ((_, errors),)) = wait_for_exit([process])
    assert code == 2, errors[-3000:]
    assert "the credentials have expired; renew them and start again" in read_sentence(errors)
    proxy.clear()
    ((code,), ((output, errors),)) = wait_for_exit([start_training(bucket, tmp_path)])
    assert code == 0, errors[-3000:]
    assert "resuming after step" in output
    assert_same_bits(f"s3://{bucket}/runs/one", on_disk, monkeypatch)


@pytest.mark.slow
def test_a_shard_that_is_replaced_during_a_run_ends_it_with_a_sentence(proxy, bucket, root, tmp_path):
    process = start_training(bucket, tmp_path)
    wait_for_requests(proxy, process, "GET", "/photos/train-")  # the other shard is needed at the first evaluation
    open_store(f"s3://{bucket}").write("photos/val-00000.tar", (root / "train-00000.tar").read_bytes())
    ((code,), ((_, errors),)) = wait_for_exit([process])
    assert code == 2, errors[-3000:]
    assert "photos/val-00000.tar: it was replaced after it was indexed" in read_sentence(errors)


def test_a_run_in_a_bucket_that_cannot_be_written_is_refused_with_a_sentence(
    proxy, bucket, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    proxy.inject(Fault("status", status=403, code="AccessDenied", times=-1, method="PUT"))
    words = ["train", *SETTINGS, "--data.path", f"s3://{bucket}/photos", "--run", f"s3://{bucket}/runs/one"]
    assert main([*words, "--pod.shape", "1x16", "--model.precision", "float32"]) == 2
    sentence = read_sentence(capfd.readouterr().err)
    assert "the store refuses access" in sentence
    assert f"s3://{bucket}/runs/one" in sentence
    assert not list(open_store(f"s3://{bucket}").list("runs"))
