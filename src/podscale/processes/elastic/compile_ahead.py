"""Compile ahead what an elastic run needs with other numbers of processes, so that a recovery loads its programs.

The sizes of the pod after the next losses are known. For each of them in turn, a launch of its own does the first steps
of the same training in a temporary folder (`compile_ahead_worker`), at low priority, and leaves its programs in the
user's cache.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from podscale.config.json_types import JsonObject
from podscale.processes.elastic.members import choose_size
from podscale.processes.launch import FINAL_CODES

LOSSES = 3  # of processes, one by one, that programs are there for
NO = ("0", "false", "f", "no", "n", "off")  # as JAX reads its options
LOG = "compile-ahead.log"
MAX_TRIES = 3  # for a size, if its processes are lost


def list_sizes_ahead(processes: int, sizes: list[int], least: int, most: int) -> list[int]:
    """Return how many processes train when none, one, two or three are lost.

    Args:
        processes: how many the launcher keeps running.
        sizes: numbers of processes that the batch divides over.
        least: fewer do not train.
        most: more do not.

    >>> list_sizes_ahead(4, [1, 2, 4, 8], 1, 4), list_sizes_ahead(5, [2, 4], 2, 4)
    ([4, 2, 1], [4, 2])
    """
    chosen = [choose_size(processes - lost, sizes, least, most) for lost in range(LOSSES + 1)]
    return list(dict.fromkeys(size for size in chosen if size is not None))


def is_cache_enabled() -> bool:
    """Return whether JAX caches programs; without a cache, there is nothing to compile ahead for."""
    return os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "").lower() not in NO


class Precompiler:
    """Compiles for one size of the pod after the other, while the run trains.

    Args:
        command: the arguments of `podscale`.
        folder: for the log.
        is_enabled: whether to compile anything.
    """

    def __init__(self, command: list[str], folder: Path, *, is_enabled: bool) -> None:
        self._command, self._log, self._is_enabled = command, folder / LOG, is_enabled
        self._known, self._tries = set[int](), Counter[int]()  # sizes that have trained, or need no further try
        self._process: subprocess.Popen[bytes] | None = None
        self._size, self._started_at, self._folder = 0, 0.0, ""

    def note_training(self, size: int) -> None:
        """Note that so many processes train, and have compiled what that takes."""
        self._known.add(size)

    def advance(self, sizes: Collection[int]) -> JsonObject | None:
        """Start with the first size that is not known, unless another one is under way.

        Args:
            sizes: those that may be needed.

        Returns:
            What is done since the last call: size, seconds and exit code; None if nothing is.
        """
        if self._process and self._process.poll() is not None:
            result: JsonObject = {
                "size": self._size,
                "seconds": round(time.monotonic() - self._started_at, 3),
                "status": self._process.returncode,
            }
            self._tries[self._size] += 1
            if self._process.returncode in FINAL_CODES or self._tries[self._size] >= MAX_TRIES:
                self._known.add(self._size)
            self._end()
            return result
        unknown = [size for size in sizes if size not in self._known]
        if self._is_enabled and not self._process and unknown:
            self._start(unknown[0])
        return None

    def give_way(self, size: int) -> None:
        """Stop compiling for a size that is about to train: those processes compile faster, at their priority."""
        if self._size == size:
            self._end()

    def close(self) -> None:
        """Stop compiling."""
        self._end()

    def _start(self, size: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="podscale-")
        module = [
            sys.executable,
            "-P",
            "-m",
            "podscale.processes.elastic.compile_ahead_worker",
            str(size),
            self._folder,
        ]
        nothing = subprocess.DEVNULL
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*module, *self._command], stdin=nothing, stdout=nothing, stderr=log, start_new_session=True
            )
        self._size, self._started_at = size, time.monotonic()

    def _end(self) -> None:
        if not self._process:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it has started
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._process, self._size = None, 0
