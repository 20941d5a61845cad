"""A request to stop, by real signals to this process."""

import os
import signal

import pytest

from podscale.errors import PreemptedError
from podscale.training import preemption


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, PreemptedError), (signal.SIGINT, KeyboardInterrupt)])
def test_a_request_that_native_code_turns_into_another_error_is_still_a_request(number, error, monkeypatch):
    """JAX's compiler calls Python back and raises RuntimeError for whatever is raised there."""
    monkeypatch.setattr(preemption, "GRACE_S", 60.0)  # the thread that ends a stuck process is not what is tested

    def call_back():
        try:
            os.kill(os.getpid(), number)
        except error:
            raise RuntimeError("Exception raised in callback") from None

    with pytest.raises(error), preemption.StopRequest(3):
        call_back()


def test_an_error_before_any_request_stays_what_it_is():
    with pytest.raises(ZeroDivisionError), preemption.StopRequest():
        raise ZeroDivisionError
