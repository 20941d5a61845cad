"""Threads of the loader: which are running, and a fixture that checks that none is left after a test."""

import gc
import threading
import time

import pytest


def list_loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("podscale-")]


@pytest.fixture
def no_loader_thread_left():
    yield
    if not list_loader_threads():
        return
    gc.collect()  # half a second, once a session has compiled many programs
    deadline = time.monotonic() + 5
    while (threads := list_loader_threads()) and time.monotonic() < deadline:
        threads[0].join(0.1)
    assert not list_loader_threads()
