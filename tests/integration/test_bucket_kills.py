"""Photos and run in a bucket, and no folder that processes share: killed, they resume from the bucket alone."""

import json
import signal
import threading

import numpy as np
import pytest
from support import photos
from support.buckets import upload_folder
from support.faulty_proxy import Fault, FaultyProxy
from support.processes import PROGRAM, find_free_port, read_losses, read_state, start, wait_for_exit

from podscale.data.tools.prepare import Settings, prepare_data_set
from podscale.storage.open import open_store

pytestmark = [pytest.mark.slow, pytest.mark.processes(4)]

PEER_LOST = 69
SETTINGS = (
    "digits --data.source tar --data.image_size 32 --data.lanes 1 --augment.crop resized --augment.flip true "
    "--model.width 8 --model.precision float64 --batch.size 32 --batch.span 16 --train.epochs 3 --train.eval_epochs 3 "
    "--plan.save_steps 8 --pod.heartbeat_s 30"
).split()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """600 photos of 320 x 240 pixels in tars of one megabyte."""
    source = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 560), ("val", 40)):
        for i in range(count):
            photos.save_image(source / "folder" / split / "abcd"[i % 4] / f"{i}.jpg", i, 320, 240, quality=85)
    prepare_data_set(source / "folder", source / "tars", Settings(shard_mib=1))
    return source / "tars"


def start_processes(count, path, run, home):
    """Start a training of so many processes on four devices; each has a home of its own, which is empty."""
    join = ["--coordinator", f"127.0.0.1:{find_free_port()}", "--processes", count, "--process"] if count > 1 else []
    shape = ["--pod.shape", "2x2"] if count > 1 else ["--pod.virtual", "2x2"]
    processes = []
    for number in range(count):
        own = home / str(number)
        own.mkdir(parents=True)
        command = [*PROGRAM, "train", *SETTINGS, "--data.path", path, "--run", run, *shape]
        places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(own))
        processes.append(start([*command, *join, *([number] if join else [])], **places))
    return processes


@pytest.fixture(scope="module")
def train_on_disk(root, tmp_path_factory):
    """A function that returns the folder of an undisturbed run of so many processes from disk."""
    folders = {}

    def train(count):
        if count not in folders:
            folders[count] = tmp_path_factory.mktemp("disk") / "run"
            home = tmp_path_factory.mktemp("home")
            codes, outputs = wait_for_exit(start_processes(count, root, folders[count], home))
            assert codes == [0] * count, outputs[0][1][-3000:]
        return folders[count]

    return train


@pytest.fixture
def proxy(s3_server, bucket, root, monkeypatch):
    upload_folder(root, s3_server, bucket, "photos")
    with FaultyProxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy


def wait_for(condition, processes):
    while not condition():
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, ended[0].communicate()[1][-3000:]
        threading.Event().wait(0.01)


# What a kill is to hit, which is made to take half a second: the second checkpoint, or samples for training.
MOMENTS = {"save": {"method": "PUT", "path": "/checkpoints/16"}, "fetch": {"method": "GET", "path": "/photos/train-"}}


def kill_during(proxy, moment, processes, victim):
    """Kill one process while the store is busy with a request; the others notice and end."""
    slow = proxy.inject(Fault("slow", seconds=0.5, times=-1, **MOMENTS[moment]))
    wait_for(lambda: slow.hits > 0, processes)
    processes[victim].send_signal(signal.SIGKILL)
    codes, outputs = wait_for_exit(processes)
    proxy.clear()
    assert codes[victim] == -signal.SIGKILL
    assert all(code == PEER_LOST for number, code in enumerate(codes) if number != victim), codes
    assert not any("Traceback" in errors for _, errors in outputs)


@pytest.mark.parametrize(("count", "victim"), [(1, 0), (4, 0), (4, 2)])
def test_killed_during_a_save_and_during_a_fetch_it_resumes_from_the_bucket_alone(
    proxy, bucket, train_on_disk, tmp_path, count, victim
):
    data, url = f"s3://{bucket}/photos", f"s3://{bucket}/runs/one"
    on_disk = train_on_disk(count)
    for moment in ("save", "fetch"):
        kill_during(proxy, moment, start_processes(count, data, url, tmp_path / moment), victim)
    codes, outputs = wait_for_exit(start_processes(count, data, url, tmp_path / "last"))
    assert codes == [0] * count, outputs[0][1][-3000:]
    assert "resuming after step" in "".join(outputs[0])
    assert read_losses(url) == read_losses(on_disk)
    ours, theirs = read_state(url), read_state(on_disk)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], name)
    check_objects(url)


def check_objects(url):
    """Assert that the bucket holds what the run needs, and nothing else."""
    store = open_store(url)
    current = json.loads(bytes(store.read("current.json")))
    folders = {current["files"], *(f"checkpoints/{entry['key']}" for entry in current["steps"].values())}
    keys = {info.key for info in store.list()} - {"current.json", "lock.json"}
    assert {key for key in keys if key.rpartition("/")[0] not in folders and key.split("/")[0] not in folders} == set()
