"""Staging: page-aligned memory in which batches are made, and from which they go to the devices.

Making a batch means writing some hundred megabytes; fresh memory would cost a page fault every 4096 bytes of them. So
memory is used again as soon as the devices have their copy. GPUs fetch from pinned memory by themselves, several times
faster than the runtime can copy from any other. On a CPU the "device" keeps the very memory it is given, so each batch
gets its own; large pages make that bearable.
"""

import mmap
import threading
from collections import deque
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray


class Staging:
    """Memory for the batches of one loader, which may be made by several threads; `close` gives it back."""

    def __init__(self, device: Any) -> None:
        self._client = device.client
        self._reused, self._pinned = device.platform != "cpu", device.platform == "gpu"
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._sent: deque[tuple[NDArray[np.uint8], Any]] = deque()  # memory, and the array it goes to
        self._made: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Memory of this shape, with anything in it."""
        size = int(np.prod(shape))
        with self._lock:
            self._collect()
            fitting = self._free.setdefault(size, [])
            memory = fitting.pop() if fitting else self._make(size)
        return memory.reshape(shape)

    def sent(self, memory: NDArray[np.uint8], array: jax.Array) -> None:
        """`memory`, as it was taken, is on its way to `array`, and may be used again once it has arrived."""
        if self._reused:
            with self._lock:
                self._sent.append((memory.reshape(-1), array))

    def close(self) -> None:
        """Waits for what is on its way, then lets go of the memory."""
        try:
            while self._sent:
                self._sent.popleft()[1].block_until_ready()
        finally:  # also where a transfer failed
            for memory in self._made if self._pinned else ():
                self._client.dma_unmap(memory.ctypes.data)
            self._made.clear()
            self._free.clear()

    def _collect(self) -> None:
        """Frees what has arrived. Never more than two are on their way: then the older one is waited for."""
        while self._sent and (len(self._sent) > 1 or self._sent[0][1].is_ready()):
            memory, array = self._sent.popleft()
            array.block_until_ready()
            self._free.setdefault(memory.size, []).append(memory)

    def _make(self, size: int) -> NDArray[np.uint8]:
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)  # a page fault every 2 MiB
        memory = np.frombuffer(pages, np.uint8, size)
        if self._reused:
            self._made.append(memory)
        if self._pinned:
            self._client.dma_map(memory.ctypes.data, size)
        return memory
