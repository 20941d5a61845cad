"""Batches made ahead of time: how many, in which order, and what happens after an error."""

import threading

import jax
import numpy as np
import pytest
from support.loader_threads import list_loader_threads, no_loader_thread_left  # noqa: F401 (a fixture)

from podscale.data.bad_images import BadImages
from podscale.data.index.dataset import Index
from podscale.data.prefetch import Batch, Batches
from podscale.errors import UserError

pytestmark = pytest.mark.usefixtures("no_loader_thread_left")


class FakeMaker:
    """Calls a function for each request, and makes batches whose count is the request."""

    device, index = jax.devices()[0], Index(np.zeros(0, np.int32), np.zeros((0, 2), np.int32))
    bad_images = BadImages(index, 1, 0.0)

    def __init__(self, work):
        self.work = work

    def list_samples(self, request):
        return np.array([], int)

    def make(self, request, pool, staging):
        self.work(request)
        return Batch(None, None, request)


def test_at_most_depth_batches_are_made_ahead():
    requests, started = [], threading.Semaphore(0)

    def work(request):
        requests.append(request)
        started.release()

    with Batches(range(9), FakeMaker(work), 1, depth=3) as batches:
        for _ in range(3):
            assert started.acquire(timeout=10)
        assert not started.acquire(timeout=0.2)  # the queue is full
        next(batches)
        assert started.acquire(timeout=10)
        assert not started.acquire(timeout=0.2)
        assert sorted(requests) == [0, 1, 2, 3]


def test_two_batches_are_made_at_once_and_arrive_in_order():
    started = [threading.Event() for _ in range(9)]

    def work(request):
        started[request].set()
        if request % 2 == 0:
            assert started[min(request + 1, 8)].wait(10)  # as if its last image took so long

    with Batches(range(9), FakeMaker(work), 1, depth=2) as batches:
        assert [batch.count for batch in batches] == list(range(9))


def test_an_error_is_raised_after_the_batches_before_it_without_waiting_for_others():
    failed = threading.Event()

    def work(request):
        if request == 2:
            assert failed.wait(10)
        if request == 3:
            failed.set()
            raise UserError("no such image")

    with Batches(range(100), FakeMaker(work), 1, depth=2) as batches:
        assert [next(batches).count for _ in range(3)] == [0, 1, 2]
        with pytest.raises(UserError, match="no such image"):
            next(batches)
        assert not list_loader_threads()
        assert list(batches) == []
