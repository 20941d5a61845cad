"""The lock of a folder in a bucket: one owner at a time, who is followed by the next once it is no longer heard of."""

import subprocess
import sys
import threading

import pytest

from podscale.errors import UserError
from podscale.storage import bucket_lock
from podscale.storage.bucket_lock import LOCK, BucketLock
from podscale.storage.open import open_store


@pytest.fixture(params=["local", "s3", "gs", pytest.param("ceph", marks=pytest.mark.slow)])
def store(request, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_lock, "BEAT_S", 0.1)
    monkeypatch.setattr(bucket_lock, "LEASE_S", 2.0)
    monkeypatch.setattr(bucket_lock, "POLL_S", 0.02)
    if request.param == "local":
        return open_store(tmp_path / "root")
    if request.param == "gs":
        return open_store(f"gs://{request.getfixturevalue('google_bucket')}/run")
    name = {"s3": "bucket", "ceph": "ceph_bucket"}[request.param]
    return open_store(f"s3://{request.getfixturevalue(name)}/run")


def test_a_second_owner_is_refused_while_the_first_lives_and_named(store):
    with BucketLock(store) as first:
        first.acquire()
        with pytest.raises(UserError, match=r"is being trained by process \d+ on .*; wait for it, or choose another"):
            BucketLock(store).acquire()
    with BucketLock(store) as second:
        second.acquire()  # at once: it was released
        assert (first.fencing_token, second.fencing_token) == (1, 2)


def test_an_owner_that_is_not_heard_of_is_followed_by_the_next(store, monkeypatch):
    """As one on another machine that has lost its network, or was killed."""
    monkeypatch.setattr(bucket_lock, "LEASE_S", 0.3)
    stalled = BucketLock(store)
    stalled._try_acquire()  # and never beats
    with BucketLock(store) as second:
        second.acquire()
        assert second.fencing_token == 2
        stalled._thread.start()  # it wakes up
        stalled._thread.join(10)
        assert not stalled._thread.is_alive()
        with pytest.raises(UserError, match="is being trained by"):
            BucketLock(store).acquire()


def test_an_owner_on_this_machine_that_has_ended_is_not_waited_for(store, monkeypatch):
    monkeypatch.setattr(bucket_lock, "LEASE_S", 3600.0)
    where = str(store.location)
    code = (
        "import sys; from podscale.storage.bucket_lock import BucketLock; from podscale.storage.open import open_store"
    )
    code += "; BucketLock(open_store(sys.argv[1])).acquire(); import os; os._exit(1)"
    assert subprocess.run([sys.executable, "-c", code, where], check=False).returncode == 1
    with BucketLock(store) as lock:
        lock.acquire()
        assert lock.fencing_token == 2


def test_of_many_that_try_at_once_one_gets_it(store):
    locks, winners = [BucketLock(store) for _ in range(5)], []

    def try_to_acquire(lock):
        try:
            lock.acquire()
            winners.append(lock)
        except UserError:
            pass

    threads = [threading.Thread(target=try_to_acquire, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lock in locks:
        lock.__exit__(None, None, None)
    assert len(winners) == 1


def test_a_lock_that_is_not_readable_is_replaced(store):
    store.write(LOCK, b"{")
    with BucketLock(store) as lock:
        lock.acquire()
        assert lock.fencing_token == 1


def test_a_beat_whose_answer_was_lost_does_not_lose_the_lock(store):
    with BucketLock(store) as lock:
        lock.acquire()
        lock._etag = "of an answer that never came"
        assert lock._is_mine()
        assert lock._etag == store.stat(LOCK).etag


@pytest.mark.parametrize("store", ["local"], indirect=True)
@pytest.mark.parametrize("error", [OSError("no answer"), UserError("the keys of the profile are gone")], ids=repr)
def test_an_owner_whose_store_fails_for_a_while_goes_on_beating(store, error, monkeypatch):
    """A beat is written though its answer is lost, and then nothing answers, nor are there credentials."""
    lock, failures, beats = BucketLock(store), threading.Semaphore(0), threading.Semaphore(0)
    fails = threading.Event()

    class FailingStore:
        def __getattr__(self, name):
            if fails.is_set():
                failures.release()
                raise error
            return getattr(store, name)

        def update(self, key, data, etag):
            if not fails.is_set():
                etag = store.update(key, data, etag)
                beats.release()
                return etag
            store.update(key, data, store.stat(key).etag)
            raise bucket_lock.ObjectChangedError(key)

    lock._store = FailingStore()
    with lock:
        lock.acquire()
        fails.set()
        assert [failures.acquire(timeout=30) for _ in range(3)] == [True] * 3
        fails.clear()
        while beats.acquire(blocking=False):
            pass
        assert beats.acquire(timeout=30)
        assert lock._thread.is_alive()
        with pytest.raises(UserError, match="is being trained by"):
            BucketLock(store).acquire()
