"""Keep the coordination services of an elastic run, one for each generation, in a process that does not train.

When a service ends, JAX's runtime aborts all its clients. So it must not live in a process that may be lost. The
launcher starts `python -m podscale.processes.elastic.coordinator` and sends commands as lines of JSON.

Processes of a generation that has lost one may wait for it: until all have connected, or for the keys that it would
have set. Then a stand-in connects in its place and sets them, to values that make the others fail at once.
"""

import json
import select
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from podscale.processes import private_jax, schedulers

MISSING = "missing "  # what the answer starts with if JAX cannot do this
RELEASE_S = 0.1  # between two searches for keys that processes wait for
ANSWER_S = 60.0  # in which the process must answer, the start of its interpreter and its imports included


class MissingPartError(Exception):
    """This version of JAX lacks a part, which is the message, that elastic runs need."""


class Generation:
    """The service of one generation.

    Args:
        size: the number of processes.
    """

    def __init__(self, size: int) -> None:
        with socket.socket() as probe:
            probe.bind((schedulers.LOOPBACK, 0))
            self.address = f"{schedulers.LOOPBACK}:{probe.getsockname()[1]}"
        self._size, self._service = size, private_jax.start_service(self.address, size)
        self._ended, self._threads = threading.Event(), list[threading.Thread]()

    def stand_in(self, ranks: list[int]) -> None:
        """Connect in the place of lost processes, and make fail what waits for them, until the generation ends."""
        for rank in ranks:
            thread = threading.Thread(target=self._stand_in, args=(rank,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _stand_in(self, rank: int) -> None:
        waiters = private_jax.WaiterRelease(private_jax.make_client(self.address, rank), rank, self._size)
        while not self._ended.wait(RELEASE_S):
            waiters.release()

    def end(self) -> None:
        """End the service, which no process may be connected to any more, once all stand-ins have left it.

        One of them may wait until all have connected, which takes up to a minute.
        """
        threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._service.shutdown()


class Coordinator:
    """The launcher's side: starts the process that keeps the services, and sends commands to it."""

    def __init__(self, **settings: Any) -> None:
        command = [sys.executable, "-P", "-m", "podscale.processes.elastic.coordinator"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process: subprocess.Popen[str] = subprocess.Popen(command, text=True, **pipes, **settings)

    def start(self, generation: int, size: int) -> str:
        """Return the address of a new generation's service.

        Raises:
            OSError: the process is gone, or did not answer in time and was ended.
            MissingPartError: JAX cannot do this.
        """
        self._send(start=generation, size=size)
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            self._process.kill()  # its pipe ends
        address = self._process.stdout.readline().strip()
        if not address:
            raise OSError("the coordinator is gone")
        if address.startswith(MISSING):
            raise MissingPartError(address.removeprefix(MISSING))
        return address

    def stand_in(self, generation: int, ranks: list[int]) -> None:
        """Release what waits for lost processes."""
        self._send(stand_in=generation, ranks=ranks)

    def end(self, generation: int) -> None:
        """End the service of a generation that all processes have left."""
        self._send(end=generation)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with suppress(BrokenPipeError):  # of a command that it did not read
                pipe.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def _send(self, **command: object) -> None:
        assert self._process.stdin
        try:
            print(json.dumps(command), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise OSError("the coordinator is gone") from None


def serve() -> None:
    """Read commands from stdin and carry them out, until it is closed."""
    generations = dict[int, Generation]()
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command and (missing := private_jax.find_missing_part()):
            print(f"{MISSING}{missing}", flush=True)
        elif "start" in command:
            generation = generations[command["start"]] = Generation(command["size"])
            print(generation.address, flush=True)
        elif "stand_in" in command:
            generations[command["stand_in"]].stand_in(command["ranks"])
        else:
            generations.pop(command["end"]).end()


if __name__ == "__main__":
    serve()
