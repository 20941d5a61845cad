"""Let processes report to the main process, and get its decision, beside what their devices do.

Messages go through JAX's key-value store, so they need no compiled program and may be sent by any thread. Every wait
is bounded. A process that dies meanwhile is found by its missing signs of life (`heartbeat.py`), which end all.
"""

import time

from podscale.processes.heartbeat import CollectiveFailedError
from podscale.processes.key_value_store import SLICE_S, KeyValueStore, StoreError

PREFIX = "podscale/exchange"


class Exchange:
    """One exchange of messages: a report from each process to the main process, and one decision for all.

    Args:
        store: what the processes share; None where there is one process.
        process: this process's number.
        processes: how many there are.
        number: of the exchange, the same in all processes.
    """

    def __init__(self, store: KeyValueStore | None, process: int, processes: int, number: int) -> None:
        self._store, self._key = store, f"{PREFIX}/{number}"
        self.process, self.processes = process, processes
        self._decision = ""

    def report(self, message: str) -> None:
        """Send this process's message to the main process."""
        self._set(f"{self._key}/{self.process}", message)

    def collect(self, timeout_s: float) -> list[str | None]:
        """Return the messages of all processes but the main one, which calls this; None where it did not come in time.

        Raises:
            CollectiveFailedError: the store does not answer.
        """
        if self._store is None:
            return []
        others = range(1, self.processes)
        try:
            messages = self._store.await_values(self._key, others, timeout_s)
        except StoreError as error:
            raise CollectiveFailedError(str(error)) from error
        return [messages.get(number) for number in others]

    def decide(self, decision: str) -> None:
        """Send the main process's decision to all processes."""
        self._decision = decision
        self._set(f"{self._key}/decision", decision)

    def await_decision(self, timeout_s: float) -> str:
        """Return the main process's decision.

        Raises:
            CollectiveFailedError: the store does not answer, or there was no decision in time.
        """
        if self.process == 0:
            return self._decision
        decision = self._get(f"{self._key}/decision", time.monotonic() + timeout_s)
        if decision is None:
            raise CollectiveFailedError(f"process 0 has decided nothing for {timeout_s:.0f} s")
        return decision

    def close(self) -> None:
        """Remove the messages; the main process calls this once all have read them."""
        if self._store is not None and self.process == 0:
            try:
                self._store.delete(self._key)
            except StoreError:
                return  # the store goes away with the processes

    def _set(self, key: str, message: str) -> None:
        if self._store is None:
            return
        try:
            self._store.set_new(key, message)
        except StoreError as error:
            raise CollectiveFailedError(str(error)) from error

    def _get(self, key: str, deadline: float) -> str | None:
        if self._store is None:
            return None
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                message = self._store.await_value(key, min(left_s, SLICE_S))
            except StoreError as error:
                raise CollectiveFailedError(str(error)) from error
            if message is not None:
                return message
        return None
