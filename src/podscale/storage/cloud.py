"""A folder in a bucket, or on a web server, as a store. The requests are obstore's (`podscale[cloud]`).

A request that fails in a way that may pass (429, 5xx, a broken or silent connection, a body that ends early) is
repeated, after pauses that grow and are random, for `get_retry_s()` seconds; after that it is a `TimeoutError`.
"""

import errno
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from podscale.errors import UserError
from podscale.storage.cloud_clients import get_retry_s, make_client
from podscale.storage.cloud_errors import translate_error
from podscale.storage.locations import Location
from podscale.storage.store import FolderListing, ObjectChangedError, ObjectInfo

MERGE_GAP = 2**17  # bytes between two ranges that are read with them rather than by another request
MAX_MERGED = 2**23  # bytes of a merged request
PART_BYTES = 2**23  # of a multipart upload
ANNOUNCE_S = 10.0  # after which a request that takes long is announced
T = TypeVar("T")


class CloudStore:
    """A folder in a bucket; see `Store`.

    Attributes:
        requests: how many requests were made, by kind; repetitions by the client do not count.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self.requests: Counter[str] = Counter()
        self._client = make_client(location)
        self._process, self._retry_s = os.getpid(), get_retry_s()
        self._has_bare_etags = False  # whether conditions hold for ETags without quotes only
        self._lock = threading.Lock()

    # --- reading ---

    def read(self, key: str, etag: str = "") -> memoryview:
        return self._get(key, etag, None)

    def read_range(self, key: str, start: int, stop: int, etag: str = "") -> memoryview:
        return self._get(key, etag, (start, stop)) if stop > start else memoryview(b"")

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], etag: str = "") -> list[memoryview]:
        results: list[memoryview] = [memoryview(b"")] * len(ranges)
        for start, stop, members in merge_ranges(ranges):
            data = self.read_range(key, start, stop, etag)
            for i in members:
                results[i] = data[ranges[i][0] - start : ranges[i][1] - start]
        return results

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        import obstore

        folder = self.location.join(prefix)
        metas = self._repeat("list", folder, lambda: obstore.list(self._client, folder.key or None).collect())
        for meta in metas:
            yield self._describe(meta)

    def list_folder(self, prefix: str = "") -> FolderListing:
        import obstore

        folder = self.location.join(prefix)
        result = self._repeat("list", folder, lambda: obstore.list_with_delimiter(self._client, folder.key or None))
        folders = sorted(path.rstrip("/").rpartition("/")[2] for path in result["common_prefixes"])
        objects = sorted((self._describe(meta) for meta in result["objects"]), key=lambda info: info.key)
        return FolderListing(tuple(folders), tuple(objects))

    def stat(self, key: str) -> ObjectInfo:
        import obstore

        where = self.location.join(key)
        return self._describe(self._call("head", where, lambda: obstore.head(self._client, where.key)))

    # --- writing ---

    def write(self, key: str, data: bytes | memoryview) -> str:
        return self._put(key, data, chunk_size=PART_BYTES)

    def write_file(self, key: str, path: Path) -> str:
        return self._put(key, path, chunk_size=PART_BYTES)

    def create(self, key: str, data: bytes | memoryview) -> str:
        try:
            return self._put(key, data, mode="create")
        except (FileExistsError, TimeoutError) as error:
            return self._confirm(key, data, error)

    def update(self, key: str, data: bytes | memoryview, etag: str) -> str:
        try:
            return self._put_if_match(key, data, etag)
        except (ObjectChangedError, TimeoutError) as error:
            return self._confirm(key, data, error)

    def delete(self, key: str) -> None:
        import obstore

        where = self._require_writable(key)
        with suppress(FileNotFoundError):
            self._call("delete", where, lambda: obstore.delete(self._client, where.key))

    # ---

    def _get(self, key: str, etag: str, bounds: tuple[int, int] | None) -> memoryview:
        """Return an object, or a range of it. A body of the wrong length is asked for again."""
        import obstore

        where = self.location.join(key)
        options: Any = {"if_match": etag} if etag else {}
        if bounds is not None:
            options["range"] = bounds

        def get() -> tuple[memoryview, int, str]:
            result = obstore.get(self._client, where.key, options=options)
            size = result.meta["size"]
            return memoryview(result.bytes()), size, self._read_etag(result.meta)

        deadline = time.monotonic() + self._retry_s
        while True:
            data, size, present = self._call("get", where, get)
            if etag and present and present != etag:
                raise ObjectChangedError(str(where))
            length = size if bounds is None else min(bounds[1], size) - bounds[0]
            if bounds is not None and size < bounds[1]:
                raise OSError(errno.EIO, f"it has {size} bytes and ends before byte {bounds[1]}", str(where))
            if len(data) == length:
                return data
            if time.monotonic() > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"{len(data)} of {length} bytes arrived, again and again", str(where)
                )
            time.sleep(0.1)

    def _put(self, key: str, data: Any, **options: Any) -> str:
        import obstore

        where = self._require_writable(key)
        result = self._call("put", where, lambda: obstore.put(self._client, where.key, data, **options))
        return self._read_etag(result) or self.stat(key).etag

    def _put_if_match(self, key: str, data: bytes | memoryview, etag: str) -> str:
        """Replace an object that has this ETag.

        Google compares generations instead. Ceph's gateway compares ETags without the quotes that it sends them with.
        """
        if self.location.scheme == "gs":
            return self._put(key, data, mode={"e_tag": etag, "version": self._find_generation(key, etag)})
        bare = etag.strip('"') if self.location.scheme == "s3" else etag
        if not self._has_bare_etags:
            try:
                return self._put(key, data, mode={"e_tag": etag})
            except ObjectChangedError:
                if bare == etag or self.stat(key).etag != etag:
                    raise
        new_etag = self._put(key, data, mode={"e_tag": bare})
        self._has_bare_etags = True
        return new_etag

    def _find_generation(self, key: str, etag: str) -> str:
        """Return Google's number of the version of an object that has this ETag."""
        import obstore

        where = self.location.join(key)
        meta = self._call("head", where, lambda: obstore.head(self._client, where.key))
        if self._read_etag(meta) != etag:
            raise ObjectChangedError(str(where))
        return meta["version"] or ""

    def _confirm(self, key: str, data: bytes | memoryview, error: OSError) -> str:
        """Return the ETag of an object whose content is ours: its answer was lost, not the request; else raise."""
        with suppress(FileNotFoundError):
            info = self.stat(key)
            if info.size == len(data) and self.read(key, info.etag) == data:
                return info.etag
        raise error

    def _call(self, kind: str, where: Location, request: Callable[[], T]) -> T:
        if os.getpid() != self._process:
            raise UserError(f"{where} cannot be read in a forked process; start it by spawn, or open the store there")
        with self._lock:
            self.requests[kind] += 1
        try:
            with _announce_wait(where, self._retry_s):
                return request()
        except Exception as error:
            raise translate_error(error, where) from None

    def _repeat(self, kind: str, where: Location, request: Callable[[], T]) -> T:
        """Call, and again where the answer broke off: of a listing's body, the client does not ask a second time."""
        deadline, pause = time.monotonic() + self._retry_s, 0.1
        while True:
            try:
                return self._call(kind, where, request)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.5, 1) * pause)
            pause = min(2 * pause, 10)

    def _require_writable(self, key: str) -> Location:
        where = self.location.join(key)
        if not where.is_writable:
            raise PermissionError(errno.EROFS, "a web server is only read from; use s3://, gs:// or az://", str(where))
        return where

    def _describe(self, meta: Any) -> ObjectInfo:
        prefix = f"{self.location.key}/" if self.location.key else ""
        return ObjectInfo(meta["path"].removeprefix(prefix), meta["size"], self._read_etag(meta))

    def _read_etag(self, answer: Any) -> str:
        """Return the ETag of an answer. Azure's listings have no quotes around it, which all else there has."""
        etag = answer["e_tag"] or ""
        return f'"{etag}"' if etag and self.location.scheme == "az" and not etag.endswith('"') else etag


@contextmanager
def _announce_wait(where: Location, retry_s: float) -> Iterator[None]:
    """Say that a request takes long if the main thread waits for it: to its user, the command would seem to hang."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    text = f"podscale: still waiting for {where} after {ANNOUNCE_S:.0f} s; it is tried for {retry_s:.0f} s"
    timer = threading.Timer(ANNOUNCE_S, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield start and stop of each request that reads some ranges, and the numbers of these ranges.

    >>> list(merge_ranges([(500, 600), (0, 100), (2**20, 2**20 + 5)]))
    [(0, 600, [1, 0]), (1048576, 1048581, [2])]
    """
    members: list[int] = []
    first = last = 0
    for i in sorted(range(len(ranges)), key=lambda i: ranges[i]):
        start, stop = ranges[i]
        if members and (start - last > MERGE_GAP or max(stop, last) - first > MAX_MERGED):
            yield first, last, members
            members = []
        first, last = (min(first, start), max(last, stop)) if members else (start, stop)
        members.append(i)
    if members:
        yield first, last, members
