"""Runs in a bucket on a real S3 server: the same bits as on disk, resumed from the bucket alone."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from rich.console import Console
from support.short_run import STEPS, train

from podscale.cli.main import main
from podscale.config.stop_condition import StopCondition
from podscale.errors import UserError
from podscale.export.inference import predict
from podscale.runs import bucket as buckets
from podscale.runs.folder import Run
from podscale.storage.open import open_store
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.checkpoint.format import Manifest
from podscale.training.restore import load_trained


@pytest.fixture(autouse=True)
def forget_copies(monkeypatch):
    """Each test starts as a process that has opened no run yet."""
    monkeypatch.setattr(buckets, "_buckets", {})


def forget_run(monkeypatch):
    monkeypatch.setattr(buckets, "_buckets", {})


def read_losses(folder):
    return [line["loss"] for line in Run.load(folder).metrics() if line["event"] == "train"]


def assert_same(url, folder):
    assert read_losses(url) == read_losses(folder)
    ours, theirs = load_trained(Run.load(url), "newest"), load_trained(Run.load(folder), "newest")
    assert ours.step == theirs.step
    for a, b in zip(
        jax.tree.leaves((ours.params, ours.stats)), jax.tree.leaves((theirs.params, theirs.stats)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(params=["s3", "az", pytest.param("ceph", marks=pytest.mark.slow)])
def url(request):
    scheme = {"ceph": "s3"}.get(request.param, request.param)
    name = request.getfixturevalue({"s3": "bucket", "az": "container", "ceph": "ceph_bucket"}[request.param])
    return f"{scheme}://{name}/runs/one"


@pytest.mark.heavy
def test_a_run_in_a_bucket_has_the_same_bits_and_resumes_from_the_bucket_alone(short_run, url, monkeypatch, capsys):
    train(url, until=StopCondition("accuracy", 0.0))
    assert Run.load(url).summary()["steps"] == 12
    forget_run(monkeypatch)
    summary = train(url, console=Console(width=200))
    assert "resuming after step 12" in capsys.readouterr().out
    assert summary["steps"] == 23
    forget_run(monkeypatch)
    assert_same(url, short_run)
    run = Run.load(url)
    assert run.has_checkpoints()
    (image,) = predict(run, [run.folder / "sample.png"])
    assert len(image["top"]) == 5
    assert (run.folder / "report.html").exists()
    store = open_store(url)
    names = {re.sub(r"^(checkpoints/)[^/]*", r"\1N", info.key) for info in store.list()}
    assert {"lock.json", "current.json", "files-2/metrics.jsonl", "checkpoints/N/manifest.json"} <= names
    assert {name.split("/")[0] for name in names} == {"lock.json", "current.json", "files-2", "checkpoints"}
    assert len(store.list_folder("checkpoints").folders) == 2


@pytest.mark.heavy
def test_a_damaged_object_is_noticed_and_the_run_resumes_from_the_one_before(short_run, bucket, monkeypatch, capsys):
    url = f"s3://{bucket}/run"
    train(url)
    store = open_store(url)
    (key,) = [info.key for info in store.list("checkpoints") if re.search(r"/23-[^/]*/arrays", info.key)]
    data = bytearray(store.read(key))
    data[len(data) // 2] ^= 16
    store.write(key, bytes(data))
    forget_run(monkeypatch)
    with pytest.raises(UserError, match=r"checkpoint s3://.*/checkpoints/23-.* is damaged: .* is not what was saved"):
        load_trained(Run.load(url), "newest")
    train(url, console=Console(width=300))
    output = " ".join(capsys.readouterr().out.split())
    assert "checkpoint 23 is damaged" in output
    assert "resuming after step 12" in output
    forget_run(monkeypatch)
    assert_same(url, short_run)
    assert store.read(key) == data  # nothing that is damaged is deleted


@pytest.mark.heavy
def test_commands_read_runs_in_buckets(bucket, tmp_path, monkeypatch, capfd):
    url = f"s3://{bucket}/run"
    train(url)
    forget_run(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--run", url, "--json"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["checkpoint"] in STEPS
    assert main(["export", url, "--format", "safetensors", "--to", str(tmp_path / "out.safetensors")]) == 0
    assert (tmp_path / "out.safetensors").exists()
    words = [
        "train",
        "digits",
        "--model.width",
        "4",
        "--train.epochs",
        "0.1",
        "--init",
        url,
        "--run",
        str(tmp_path / "b"),
    ]
    assert main(words) == 0
    assert json.loads((tmp_path / "b" / "init.json").read_text())["taken"] > 10


def test_a_bucket_that_takes_no_more_keeps_old_checkpoints(bucket, monkeypatch):
    from podscale.training.checkpoint.checkpoints import CheckpointNotSavedError

    folder = buckets.resolve_folder(f"s3://{bucket}/run")
    with buckets.open_lock(folder) as lock:
        lock.acquire()
        with Checkpoints(folder / "checkpoints", keep=1) as checkpoints:
            checkpoints.save(1, {"w": jax.numpy.arange(5.0)})
            checkpoints.wait()
            store = buckets.find_bucket(folder).store
            with monkeypatch.context() as patch:
                refused = PermissionError(13, "the store refuses access", "x")
                patch.setattr(type(store), "write", lambda *_: (_ for _ in ()).throw(refused))
                checkpoints.save(2, {"w": jax.numpy.arange(5.0)})
                with pytest.raises(CheckpointNotSavedError, match="the store refuses access"):
                    checkpoints.wait()
            assert checkpoints.steps() == [1]
            checkpoints.save(3, {"w": jax.numpy.arange(5.0)})
            checkpoints.wait()
            assert checkpoints.steps() == [3]
            np.testing.assert_array_equal(checkpoints.restore(3, {"w": jax.numpy.zeros(5)})["w"], np.arange(5.0))
    assert len(store.list_folder("checkpoints").folders) == 1


# --- real processes --------------------------------------------------------------------------------------------------

WORDS = "digits --model.width 8 --train.epochs 6 --train.eval_epochs 3 --json --plan.save_steps 10 --pod.virtual 2x2"
SETTINGS = [*WORDS.split(), "--pod.heartbeat_s", "30"]


def start_training(processes, url, home):
    """Start a training whose processes share nothing but the bucket: no home, no folder."""
    home.mkdir()
    launch = ["launch", "-n", str(processes)] if processes > 1 else []
    command = [sys.executable, "-m", "podscale", *launch, "train", *SETTINGS, "--run", str(url)]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home),
        "TMPDIR": str(home),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, cwd=home, text=True, start_new_session=True, **pipes)


@pytest.mark.slow
@pytest.mark.processes(4)
@pytest.mark.parametrize("processes", [1, 4])
def test_killed_during_a_save_it_resumes_from_the_bucket_with_an_empty_home(tmp_path, bucket, processes):
    whole = start_training(processes, tmp_path / "whole", tmp_path / "home0")
    _, err = whole.communicate(timeout=600)
    assert whole.returncode == 0, err[-3000:]
    url = f"s3://{bucket}/runs/killed"
    store, first = open_store(url), start_training(processes, url, tmp_path / "home1")
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and first.poll() is None:
        attempts = {int(name.split("-")[0]) for name in store.list_folder("checkpoints").folders}
        if attempts and max(attempts) >= 20:  # the second checkpoint is being written, or has just been
            break
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    keys = [info.key for info in store.list("checkpoints") if info.key.endswith("/manifest.json")]
    whole_steps = sorted({int(re.search(r"checkpoints/(\d+)-", key)[1]) for key in keys})
    second = start_training(processes, url, tmp_path / "home2")
    _, err = second.communicate(timeout=600)
    assert second.returncode == 0, err[-3000:]
    resumed = re.search(r"resuming after step (\d+)\b", err)
    assert resumed, err[-3000:]
    assert int(resumed[1]) in whole_steps[-2:]  # the last one may be whole, and not committed yet
    assert_same(url, tmp_path / "whole")
    manifests = [info.key for info in store.list("checkpoints") if info.key.endswith("manifest.json")]
    assert all(len(Manifest.from_bytes(bytes(store.read(key))).files) >= 1 for key in manifests)
    assert len(manifests) == len(store.list_folder("checkpoints").folders)
