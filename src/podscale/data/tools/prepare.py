"""Prepare: a data set written again as shards from which training reads faster, sample for sample the same.

Sample i of the source is sample i of what is prepared, with the same label and class name. By default its pixels are
the same too: JPEGs get restart tiles, of which a crop decodes only what it needs, and remain ordinary JPEGs; all else
is copied. Pictures may also be shrunk, as the recipe field `data.shrink` shrinks them, encoded again, or stored as
pixels.

The target folder holds `train-00000.tar ...`, `val-00000.tar ...`, `classes.txt`, the index of all these, and
`prepare.json`: from what and how it is prepared, and which shards are whole. A prepare that was stopped goes on after
the last of them. Bytes depend on the source, the settings and the versions of the codecs; on no clock, no thread.
"""

import hashlib
import io
import json
import os
import re
import time
from collections import Counter, deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from podscale import recipe
from podscale.config.fields import replace_fields
from podscale.data import decode
from podscale.data.files import Files, Progress
from podscale.data.index import catalog, table
from podscale.data.index.dataset import Index, Splits, open_index
from podscale.data.index.table import SPLITS
from podscale.data.tools.shards import Shard, class_list, key_of, sample_bytes, shard_name, write_classes
from podscale.data.tools.target import Settings, Target, check_apart, claimed
from podscale.errors import UserError

QUALITY, SUBSAMPLING = 90, "420"
MOST_SIDE = 65_500  # libjpeg's limit
AHEAD_PER_THREAD = 4
AHEAD_BYTES = 2**30
WORK_BYTES_PER_PIXEL = 8  # coefficients of 2 bytes, or pixels, and the file itself
_EXTENSIONS = {b"\xff\xd8": "jpg", b"\x89P": "png", b"RI": "webp", b"P6": "ppm"}


class Stored(NamedTuple):
    """A picture as it goes into a shard, and how it came to be."""

    data: bytes
    extension: str
    how: str


def prepare(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    settings: Settings,
    kind: str = "",
    threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Prepares the data set `source` in a folder, or goes on with it, and returns a summary.

    `kind` is the source's ("folder", "tar", "tfrecord", "parquet"); it may be left to be found. `threads` are as many
    as there are cores, unless said otherwise.
    """
    began = time.monotonic()
    place, goal = Path(source), Path(folder)
    kind = catalog.kind_of(place, kind)
    check_apart(place, goal)
    Target.open(goal, settings)  # a scan may take minutes, and a refusal should not
    data = replace_fields(recipe.Data(shrink=settings.longest or 0), "data", {"source": kind, "path": str(place)})
    splits = open_index(data, _doing("indexing", progress))
    class_list(splits.classes)
    with claimed(goal):
        target = Target.open(goal, settings).begun(_digest(splits))
        already = target.finished
        if not already:
            _write(splits, target, threads or _cores(), progress)
            catalog.store_beside("tar", goal, _doing("indexing", progress))
            _check_same(splits, target, place)
            target = target.finish()
    return _summary(splits, kind, target) | {"already": already, "seconds": time.monotonic() - began}


# --- one picture ---------------------------------------------------------------------------------------------------


def stored(index: Index, sample: int, settings: Settings) -> Stored:
    """A sample of an index that is shrunk already, in its new form."""
    if settings.raw:
        return Stored(_ppm(index.pixels(sample)), "ppm", "raw")
    if settings.quality is not None or index.shrinks(np.array([sample]))[0]:
        return _encoded(index.pixels(sample), index.name(sample), settings)
    return _lossless(index.read(sample), index.name(sample))


def _lossless(data: bytes, name: str) -> Stored:
    """Tiled; or as it is, if it can be decoded at all."""
    extension = _EXTENSIONS.get(data[:2], "")
    try:
        return Stored(decode.tile(data), "jpg", "tiled")
    except ValueError as error:
        decode.decode(data, name)
        why = f"JPEG: {re.sub(r'0x[0-9a-f]+|[0-9]+', 'N', str(error))}" if extension == "jpg" else extension
        return Stored(data, extension, f"copied ({why})")


def _encoded(pixels: NDArray[np.uint8], name: str, settings: Settings) -> Stored:
    height, width = pixels.shape[:2]
    if max(width, height) > MOST_SIDE:
        raise UserError(
            f"cannot encode {name}: it has {width}x{height} pixels and a JPEG at most {MOST_SIDE} a side; add --longest"
        )
    file, subsampling = io.BytesIO(), ":".join(settings.subsampling or SUBSAMPLING)
    Image.fromarray(pixels).save(file, "JPEG", quality=settings.quality or QUALITY, subsampling=subsampling)
    try:
        return Stored(decode.tile(file.getvalue()), "jpg", "encoded")
    except ValueError:
        return Stored(file.getvalue(), "jpg", "encoded (not tiled)")


def _ppm(pixels: NDArray[np.uint8]) -> bytes:
    return b"P6\n%d %d\n255\n" % pixels.shape[1::-1] + pixels.tobytes()


# --- all of them ---------------------------------------------------------------------------------------------------


def _write(splits: Splits, target: Target, threads: int, progress: Progress | None) -> None:
    """What is missing of both splits."""
    write_classes(target.folder, splits.classes)
    total, before, tell = len(splits.train) + len(splits.val), 0, _doing("preparing", progress)
    for split in SPLITS:
        index: Index = getattr(splits, split)
        with (
            _Packer(split, index, target) as packer,
            closing(_made(index, packer.next, target, threads)) as made,
        ):
            for picture in made:
                packer.add(picture)
                if tell is not None:
                    tell("pictures", before + packer.next, total)
        before += len(index)


class _Packer:
    """Puts the pictures of a split into shards; after an error, only whole shards are left."""

    def __init__(self, split: str, index: Index, target: Target) -> None:
        self.split, self.index, self.target = split, index, target
        self.next = target.samples(split)
        self._shard: Shard | None = None
        self._how: Counter[str] = Counter()

    def add(self, picture: Stored) -> None:
        """The next sample."""
        room = self.target.settings.shard_mib * 2**20 - sample_bytes(picture.data)
        if self._shard is not None and self._shard.bytes > room:
            self._finish(self._shard)
        if self._shard is None:
            self._shard = Shard(self.target.folder / shard_name(self.split, self.target.shards(self.split)))
        assert self.index.files is not None
        names = self.index.files.table.names
        key = key_of(self.next, names[self.next] if len(names) else "")
        self._shard.add(key, picture.extension, picture.data, int(self.index.labels[self.next]))
        self._how[picture.how] += 1
        self.next += 1

    def _finish(self, shard: Shard) -> None:
        shard.finish()
        self.target.add(self.split, shard, self._how)
        self._shard, self._how = None, Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._shard is not None and error is None:
            self._finish(self._shard)
        elif self._shard is not None:
            self._shard.abandon()


def _made(index: Index, first: int, target: Target, threads: int) -> Generator[Stored, None, None]:
    """The pictures from `first` on, in order, made by threads that are not far ahead of who takes them.

    Few pictures, and few bytes of them, are worked on or wait at any time; one alone may be of any size.
    """
    assert index.files is not None
    costs = index.files.table.sizes[first:].astype(np.int64).prod(axis=1) * WORK_BYTES_PER_PIXEL
    waiting: deque[tuple[Future[Stored], int]] = deque()
    held = 0
    with ThreadPoolExecutor(threads, "podscale-prepare") as pool:
        try:
            for sample, cost in enumerate(costs.tolist(), first):
                while waiting and (len(waiting) >= AHEAD_PER_THREAD * threads or held + cost > AHEAD_BYTES):
                    future, freed = waiting.popleft()
                    yield future.result()
                    held -= freed
                waiting.append((pool.submit(stored, index, sample, target.settings), cost))
                held += cost
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            for future, _ in waiting:
                future.cancel()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _doing(verb: str, progress: Progress | None) -> Progress | None:
    """Progress that says what is being done."""
    return None if progress is None else lambda what, done, total: progress(f"{verb} {what}", done, total)


# --- the whole of it -----------------------------------------------------------------------------------------------


def _digest(splits: Splits) -> str:
    """What tells one source from another: every sample's place, bytes, size and label, and the names of the classes."""
    found = hashlib.sha256(json.dumps(splits.classes).encode())
    for split in SPLITS:
        files: Files = getattr(splits, split).files
        found.update(json.dumps(files.table.places).encode())
        for name in ("labels", "sizes", "files", "offsets", "lengths"):
            found.update(np.ascontiguousarray(getattr(files.table, name)).data)
        found.update(files.table.names.blob.tobytes())
    return found.hexdigest()


def _check_same(splits: Splits, target: Target, source: Path) -> None:
    """Refuses shards in which not every sample has the label and the size that it has in the source."""
    found = table.load(target.folder / catalog.BESIDE)
    pairs = [] if found is None else [(getattr(found, split), getattr(splits, split)) for split in SPLITS]
    same = [np.array_equal(a.labels, b.labels) and np.array_equal(a.sizes, b.sizes) for a, b in pairs]
    if found is None or found.classes != splits.classes or not all(same):
        raise UserError(f"{source} has changed while it was prepared; remove {target.folder} and prepare it again")


def _summary(splits: Splits, kind: str, target: Target) -> dict[str, Any]:
    shards = [shard for split in SPLITS for shard in target.whole[split]]
    how: Counter[str] = Counter()
    for shard in shards:
        how.update(shard["how"])
    bytes_in = sum(int(getattr(splits, split).encoded_bytes().sum()) for split in SPLITS)
    bytes_out = sum(shard["bytes"] for shard in shards)
    return {
        "prepared": str(target.folder),
        "source": kind,
        "classes": len(splits.classes),
        "pictures": {split: len(getattr(splits, split)) for split in SPLITS},
        "shards": len(shards),
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "ratio": bytes_out / bytes_in,
        "how": dict(how.most_common()),
    }
