"""Threads that wait for a bucket's answers."""

import threading

from podscale.data.bucket.workers import Workers


def test_tasks_of_a_burst_run_side_by_side_though_some_threads_were_idle():
    """A task behind one that waits for the store would wait, too."""
    workers = Workers(8, "test")
    for tasks in (3, 8):
        barrier = threading.Barrier(tasks + 1, timeout=20)
        for _ in range(tasks):
            workers.submit(barrier.wait)
        barrier.wait()  # until all tasks run
    workers.close()
    workers.join()


def test_there_are_no_more_threads_than_allowed():
    workers, done = Workers(2, "test"), threading.Semaphore(0)
    for _ in range(20):
        workers.submit(done.release)
    workers.close()
    workers.join()
    assert all(done.acquire(blocking=False) for _ in range(20))
    assert len(workers._threads) <= 2
