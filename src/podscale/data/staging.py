"""Staging: page-aligned memory in which batches are made, and from which they are transferred to the devices.

Making a batch writes some hundred megabytes; fresh memory would cost a page fault every 4096 bytes. So memory is
reused as soon as the devices have their copy. GPUs read from pinned memory by themselves, several times faster than
the runtime can copy from any other memory. On a CPU the "device" keeps the memory it is given; it is reused once no
array refers to it any more. Large pages keep the page faults few.
"""

import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray


class Staging:
    """Memory for the batches of one loader, which several threads may make; `close` frees it.

    Args:
        device: one of the devices that the batches are transferred to.
    """

    def __init__(self, device: jax.Device) -> None:
        self._client = device.client
        self._can_reuse, self._is_pinned = device.platform != "cpu", device.platform == "gpu"
        self._free: dict[int, list[NDArray[np.uint8]]] = {}  # by size
        self._unused: dict[int, deque[mmap.mmap]] = {}  # on a CPU, by size: what no array refers to any more
        self._transfers: deque[tuple[NDArray[np.uint8], Any]] = deque()  # memory, and the array it is copied to
        self._buffers: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return memory of this shape, with undefined contents."""
        size = int(np.prod(shape))
        with self._lock:
            self._collect()
            fitting = self._free.setdefault(size, [])
            memory = fitting.pop() if fitting else self._allocate(size) if self._can_reuse else self._lend(size)
        return memory.reshape(shape)

    def reuse_after(self, memory: NDArray[np.uint8], array: jax.Array) -> None:
        """Reuse `memory`, which came from `take`, once its transfer to `array` is complete."""
        if self._can_reuse:
            with self._lock:
                self._transfers.append((memory.reshape(-1), array))

    def close(self) -> None:
        """Wait for all transfers, then free the memory."""
        try:
            while self._transfers:
                self._transfers.popleft()[1].block_until_ready()
        finally:  # also where a transfer failed
            for memory in self._buffers if self._is_pinned else ():
                self._client.dma_unmap(memory.ctypes.data)
            self._buffers.clear()
            self._free.clear()
            self._unused.clear()

    def _collect(self) -> None:
        """Reclaim memory whose transfer is complete. Of two transfers in progress, wait for the older one."""
        while self._transfers and (len(self._transfers) > 1 or self._transfers[0][1].is_ready()):
            memory, array = self._transfers.popleft()
            array.block_until_ready()
            self._free.setdefault(memory.size, []).append(memory)

    def _allocate(self, size: int) -> NDArray[np.uint8]:
        memory = np.frombuffer(_map_pages(size), np.uint8, size)
        self._buffers.append(memory)
        if self._is_pinned:
            self._client.dma_map(memory.ctypes.data, size)
        return memory

    def _lend(self, size: int) -> NDArray[np.uint8]:
        """Return memory that comes back by itself with the last array that refers to it, which may be a device's."""
        unused = self._unused.setdefault(size, deque())
        pages = unused.pop() if unused else _map_pages(size)
        memory = np.frombuffer(pages, np.uint8, size)
        # Without a lock: a garbage collection may call it at any point of any thread.
        weakref.finalize(memory, unused.append, pages).atexit = False
        return memory


def _map_pages(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has no large pages
            pages.madvise(mmap.MADV_HUGEPAGE)  # a page fault every 2 MiB
    return pages
