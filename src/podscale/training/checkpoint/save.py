"""Write a checkpoint beside the training, together with the other processes.

Each process copies its part of the state to the host, so that training can go on, and writes it in a thread. Then it
reports to the main process: the checksums of what it has written, or why it could not. The main process writes the
manifest if all have succeeded, and reports the outcome to all. So either all processes have the checkpoint or all know
the same reason, and nobody waits for a process that cannot write.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from podscale.parallel.checksum import MODULUS, checksum_host_array
from podscale.processes.exchange import Exchange
from podscale.processes.heartbeat import CollectiveFailedError
from podscale.training.checkpoint.folder import Attempt
from podscale.training.checkpoint.format import ArraySpec, FilePart, Manifest, cut_stream, find_pieces, order_arrays

TIMEOUT_S = 1800.0  # in which every process must have written its part


class Store(Protocol):
    """Where checkpoints are written."""

    def write_part(self, attempt: Attempt, name: str, blocks: Sequence[Any]) -> None: ...
    def commit(self, attempt: Attempt, manifest: Manifest) -> None: ...
    def discard(self, attempt: Attempt) -> None: ...
    def delete(self, step: int) -> None: ...


class HostPiece(NamedTuple):
    """Values of an array on the host, in one dimension, from the array's index `first` on."""

    array: int
    first: int
    values: NDArray


@dataclass(frozen=True)
class Contents:
    """What is saved, apart from the arrays' values.

    Attributes:
        step: the number of updates done.
        accuracy: validation accuracy, if there was an evaluation.
        about: facts for people.
        arrays: in the order of the stream.
        writers: how many processes share the work.
    """

    step: int
    accuracy: float | None
    about: Any
    arrays: list[ArraySpec]
    writers: int

    @cached_property
    def parts(self) -> list[range]:
        """The parts of the stream."""
        return cut_stream(sum(spec.size for spec in self.arrays), self.writers)

    @cached_property
    def files(self) -> tuple[FilePart, ...]:
        """The files, one for each part."""
        return tuple(FilePart(f"arrays-{number}.bin", len(part)) for number, part in enumerate(self.parts))

    def find_part(self, process: int) -> int | None:
        """Return which part a process writes; None if it writes none."""
        parts = len(self.parts)
        numbers = [number for number in range(parts) if number * self.writers // parts == process]
        return numbers[0] if numbers else None

    def make_manifest(self, sums: Sequence[Mapping[str, int]]) -> Manifest:
        """Return the manifest, from the checksums of each process's pieces by array."""
        digests = [sum(part.get(str(i), 0) for part in sums) % MODULUS for i in range(len(self.arrays))]
        return Manifest(self.step, self.accuracy, self.about, self.files, tuple(self.arrays), tuple(digests))


def describe_contents(
    step: int, arrays: Mapping[str, jax.Array], accuracy: float | None, about: Any, writers: int
) -> Contents:
    """Return what a checkpoint of these arrays holds."""
    return Contents(step, accuracy, about, order_arrays(arrays), writers)


def copy_to_host(contents: Contents, arrays: Mapping[str, jax.Array], process: int) -> list[HostPiece]:
    """Return a copy of what a process writes; the arrays on the devices may change afterwards."""
    number = contents.find_part(process)
    pieces = [] if number is None else list(find_pieces(contents.arrays, contents.parts[number]))
    local = {piece.array: _get_local(arrays[contents.arrays[piece.array].name]) for piece in pieces}
    for array in local.values():
        array.copy_to_host_async()
    copies = []
    for piece in pieces:
        flat = np.ascontiguousarray(local[piece.array]).reshape(-1)
        size = flat.dtype.itemsize
        values = flat[piece.start // size : piece.stop // size]
        on_host = next(iter(local[piece.array].devices())).platform == "cpu"  # NumPy then shows the device's own memory
        copies.append(HostPiece(piece.array, piece.start // size, values.copy() if on_host else values))
    return copies


def _get_local(array: Any) -> Any:
    """Return an array that this process can read as a whole."""
    if not isinstance(array, jax.Array):
        return jax.numpy.asarray(array)
    if array.is_fully_replicated:
        return array.addressable_data(0)
    if not array.is_fully_addressable:
        raise ValueError("a checkpoint takes arrays that every process holds as a whole")
    return array


class BackgroundSave:
    """One checkpoint that a thread writes.

    Args:
        store: where to.
        attempt: the step, and a token that all processes share.
        contents: what is saved.
        pieces: this process's part of it.
        exchange: for this save alone.
        expired: steps of checkpoints to delete once this one is complete.
    """

    def __init__(
        self,
        store: Store,
        attempt: Attempt,
        contents: Contents,
        pieces: list[HostPiece],
        exchange: Exchange,
        expired: Sequence[int] = (),
    ) -> None:
        self._store, self.attempt, self.contents, self._exchange = store, attempt, contents, exchange
        self._pieces, self.expired = pieces, expired
        self._previous: BackgroundSave | None = None
        self._reason = ""
        self._error: Exception | None = None
        self._is_decided = threading.Event()
        self._thread = threading.Thread(target=self._run, name="podscale-checkpoint", daemon=True)

    def start(self, previous: "BackgroundSave | None") -> None:
        """Start to write, once an earlier save has ended."""
        self._previous = previous
        self._thread.start()

    def is_complete(self) -> bool:
        """Return whether the checkpoint is complete in all processes."""
        return self._is_decided.is_set() and not (self._reason or self._error)

    def wait(self) -> str:
        """Wait until the checkpoint is complete in all processes; return why it is not, or "".

        Raises:
            CollectiveFailedError: the processes could not agree; one may be gone.
        """
        self._is_decided.wait()
        if self._error:
            raise self._error
        return self._reason

    def join(self) -> None:
        """Wait until nothing more is written or deleted."""
        self._thread.join()

    # --- in the thread ---

    def _run(self) -> None:
        if self._previous:
            self._previous.join()
        try:
            self._reason = self._write()
        except Exception as error:
            self._error = error
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._pieces, self._previous = [], None
            self._is_decided.set()
        if self._exchange.process == 0:
            self._clean_up()

    def _write(self) -> str:
        """Write this process's part and, in the main process, the manifest; return why that failed, or ""."""
        report = self._write_part()
        if self._exchange.process == 0:
            self._exchange.decide(self._complete(report))
        else:
            self._exchange.report(json.dumps(report))
        return self._exchange.await_decision(2 * TIMEOUT_S)

    def _write_part(self) -> dict[str, Any]:
        """Return the checksums of what this process has written, or the problem."""
        number = self.contents.find_part(self._exchange.process)
        try:
            if number is not None:
                blocks = [piece.values.view(np.uint8) for piece in self._pieces]
                self._store.write_part(self.attempt, self.contents.files[number].name, blocks)
        except OSError as error:
            return {"problem": describe_problem(error)}
        return {"sums": {str(p.array): checksum_host_array(p.values, p.first) for p in self._pieces}}

    def _complete(self, report: dict[str, Any]) -> str:
        """Wait for the other processes and write the manifest; return why that failed, or ""."""
        reports = [report]
        for number, text in enumerate(self._exchange.collect(TIMEOUT_S), start=1):
            missing = {"problem": f"process {number} has not written its part in {TIMEOUT_S:.0f} s"}
            reports.append(missing if text is None else json.loads(text))
        if self._previous:
            self._previous._exchange.close()  # all processes have read how it ended
        for other in reports:
            if problem := other.get("problem"):
                return str(problem)
        try:
            self._store.commit(self.attempt, self.contents.make_manifest([other["sums"] for other in reports]))
        except OSError as error:
            return describe_problem(error)
        return ""

    def _give_up(self, problem: str) -> None:
        """Report to the others that this process cannot continue, so that they do not wait."""
        with suppress(CollectiveFailedError):
            if self._exchange.process == 0:
                self._exchange.decide(problem)
            else:
                self._exchange.report(json.dumps({"problem": problem}))

    def _clean_up(self) -> None:
        if self._reason or self._error:
            self._store.discard(self.attempt)
            return
        for step in self.expired:
            self._store.delete(step)


def describe_problem(error: OSError) -> str:
    """Return why something could not be written, without the name of the file."""
    return error.strerror or str(error) or type(error).__name__
