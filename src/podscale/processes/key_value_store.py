"""The key-value store that all processes of a run share: JAX's, which process 0 keeps."""

import time
from collections.abc import Callable
from typing import Any

import jax

StoreError = jax.errors.JaxRuntimeError  # process 0 does not answer, or a key is there already, or missing
NOT_THERE = ("DEADLINE_EXCEEDED", "NOT_FOUND")  # how the store says that there is no such key

CHECK_S = 0.2  # between two checks during a wait
SLICE_S = 5.0  # the longest single wait on the store; longer waits are repeated


class KeyValueStore:
    """Strings by key; any thread may use it. A call waits for process 0, without a limit unless one is given.

    Args:
        client: JAX's distributed client.
        check: called repeatedly while a call waits; raises what ends the wait.
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
        pairs = ((key.removeprefix(f"{prefix}/"), value) for key, value in self._client.key_value_dir_get(prefix))
        return {int(name): value for name, value in pairs if name.isascii() and name.isdecimal()}

    def await_values(self, prefix: str, processes: range, timeout_s: float) -> dict[int, str]:
        """Return the values of the keys `prefix`/N of these processes once all are there, or those that came in time.

        All keys are read at once, in one request if they are there. Else it waits for the first that is missing, then
        reads all again, waits for two, then four: so there are at most log2(processes) such requests, unless one of
        them takes longer than `SLICE_S` to come.

        Raises:
            StoreError: process 0 is gone.
        """
        deadline, count = time.monotonic() + timeout_s, 1
        while True:
            present = self.list_by_process(prefix)
            missing = [number for number in processes if number not in present]
            left_s = min(deadline - time.monotonic(), SLICE_S)
            if not missing or left_s <= 0:
                return {number: present[number] for number in processes if number in present}
            if all(self.await_value(f"{prefix}/{number}", left_s) is not None for number in missing[:count]):
                count *= 2

    def delete(self, prefix: str) -> None:
        """Delete all keys below a prefix."""
        self._client.key_value_delete(f"{prefix}/")

    def wait_at_barrier(self, name: str, timeout_s: float) -> None:
        """Wait until all processes have called this with the same name; each name serves once."""
        self._client.wait_at_barrier(name, round(1000 * timeout_s))
