"""A byte range of anything that reads ranges, presented as a file."""

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class RangeFile(io.RawIOBase):
    """A read-only file of the bytes `offset` to `offset + length - 1` of something larger.

    Args:
        read: takes an offset and a length, and returns the bytes there; fewer only at the end.
        offset: where the range starts.
        length: how many bytes it has.

    >>> digits = b"0123456789"
    >>> file = RangeFile(lambda at, count: digits[at : at + count], 3, 4)
    >>> file.read(), file.seek(-1, os.SEEK_END), file.read()
    (b'3456', 3, b'6')
    """

    def __init__(self, read: Callable[[int, int], "Buffer"], offset: int, length: int) -> None:
        super().__init__()
        self._read, self._offset, self._length, self._position = read, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise ValueError("a position before the start")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: "Buffer") -> int:
        target = memoryview(buffer)
        count = max(min(len(target), self._length - self._position), 0)
        data = memoryview(self._read(self._offset + self._position, count))
        target[: len(data)] = data
        self._position += len(data)
        return len(data)
