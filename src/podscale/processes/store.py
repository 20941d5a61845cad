"""The key-value store that all processes of a run share: JAX's, which process 0 keeps."""

import time
from collections.abc import Callable
from typing import Any

import jax

StoreError = jax.errors.JaxRuntimeError  # process 0 does not answer, or a key is there already, or missing
NOT_THERE = ("DEADLINE_EXCEEDED", "NOT_FOUND")  # how the store says that there is no such key

CHECK_S = 0.2  # between two checks during a wait


class Store:
    """Strings by key; any thread may use it. A call waits for process 0, without a limit unless one is given.

    Args:
        client: JAX's distributed client.
        check: called again and again while a call waits; raises what ends the wait.
    """

    def __init__(self, client: Any, check: Callable[[], None] | None = None) -> None:
        self._client, self._check = client, check

    def set(self, key: str, value: str) -> None:
        """Set a key, in place of what it had before."""
        self._client.key_value_set(key, value, allow_overwrite=True)

    def set_new(self, key: str, value: str) -> None:
        """Set a key that must not be there yet.

        Raises:
            StoreError: it is there.
        """
        self._client.key_value_set(key, value)

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it is not there, or process 0 is gone."""
        try:
            return str(self._client.key_value_try_get(key))
        except StoreError:
            return None

    def await_value(self, key: str, timeout_s: float) -> str | None:
        """Return the value of a key once it is there; None if it was not there in time.

        Raises:
            StoreError: process 0 is gone.
        """
        if self._check is None:
            return self._await_value(key, timeout_s)
        deadline, value = time.monotonic() + timeout_s, None
        while value is None and (left_s := deadline - time.monotonic()) > 0:
            self._check()
            value = self._await_value(key, min(left_s, CHECK_S))
        return value

    def _await_value(self, key: str, timeout_s: float) -> str | None:
        try:
            return str(self._client.blocking_key_value_get(key, max(1, round(1000 * timeout_s))))
        except StoreError as error:
            if str(error).startswith(NOT_THERE):
                return None
            raise

    def list_by_process(self, prefix: str) -> dict[int, str]:
        """Return the values of the keys `prefix`/N by the number N of a process."""
        return {int(key.rpartition("/")[2]): value for key, value in self._client.key_value_dir_get(prefix)}

    def delete(self, prefix: str) -> None:
        """Delete all keys below a prefix."""
        self._client.key_value_delete(f"{prefix}/")

    def wait_at_barrier(self, name: str, timeout_s: float) -> None:
        """Wait until all processes have called this with the same name; each name serves once."""
        self._client.wait_at_barrier(name, round(1000 * timeout_s))
