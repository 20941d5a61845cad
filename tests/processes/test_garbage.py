"""Garbage collection pauses while a training starts, and goes on after it."""

import gc

import pytest

from podscale.processes.garbage import pause_collection


def fail_while_paused():
    with pause_collection():
        raise RuntimeError


def test_collection_goes_on_after_an_error():
    with pytest.raises(RuntimeError):
        fail_while_paused()
    assert gc.isenabled()


def test_a_collection_that_was_off_stays_off():
    gc.disable()
    try:
        with pause_collection(), pause_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
