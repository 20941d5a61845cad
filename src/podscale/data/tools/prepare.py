"""Prepare a data set: write the same samples again as shards that training reads faster.

Sample i of the source is sample i of the prepared data set, with the same label and class name. By default its pixels
are the same too: JPEGs get restart tiles, of which a crop decodes only those it needs, and remain ordinary JPEGs; all
other images are copied. Images may also be shrunk, as the recipe field `data.shrink` shrinks them, encoded again, or
stored as pixels.

The target folder holds `train-00000.tar ...`, `val-00000.tar ...`, `classes.txt`, the index of all these, and
`prepare.json`: its source, its settings and its complete shards. A prepare that was stopped resumes after the last of
them. The bytes depend on the source, the settings and the versions of the codecs, but not on time or threads.
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
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from podscale import recipe
from podscale.config.fields import replace_fields
from podscale.config.json_types import JsonObject
from podscale.data import decode
from podscale.data.files import Files, Progress
from podscale.data.index import catalog, table
from podscale.data.index.bucket_index import open_folder
from podscale.data.index.containers.entries import Folder
from podscale.data.index.dataset import Index, Splits, open_index
from podscale.data.index.table import SPLITS
from podscale.data.tools.shards import (
    Shard,
    count_sample_bytes,
    format_class_list,
    format_shard_name,
    make_key,
    write_classes,
)
from podscale.data.tools.target import Settings, Target, check_disjoint, lock_folder
from podscale.errors import UserError
from podscale.processes.host import count_usable_cores
from podscale.storage.paths import require_local

QUALITY, SUBSAMPLING = 90, "420"
MAX_SIDE = 65_500  # libjpeg's limit
QUEUED_PER_THREAD = 4
QUEUED_BYTES = 2**30
WORK_BYTES_PER_PIXEL = 8  # coefficients of 2 bytes, or pixels, and the file itself
_EXTENSIONS = MappingProxyType({b"\xff\xd8": "jpg", b"\x89P": "png", b"RI": "webp", b"P6": "ppm"})


class Source(NamedTuple):
    """A data set to prepare, and a digest that identifies it."""

    folder: Folder
    kind: str
    splits: Splits
    digest: str
    max_image_bytes: int


class EncodedImage(NamedTuple):
    """An image as it is stored in a shard, and how it was made."""

    data: bytes
    extension: str
    method: str


def prepare_data_set(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    settings: Settings,
    kind: str = "",
    threads: int = 0,
    progress: Progress | None = None,
    max_image_mib: int = recipe.Data.max_image_mib,
) -> JsonObject:
    """Prepare the data set `source` in a folder, or resume an earlier prepare of it.

    Args:
        source: folder of the data set.
        folder: target folder; new, empty, or of an earlier prepare with the same source and settings.
        settings: how images are prepared.
        kind: the source's kind ("folder", "tar", "tfrecord", "parquet"); detected if empty.
        threads: number of threads; 0 for one per usable core.
        progress: called with what is counted, how many are done, and of how many.
        max_image_mib: memory that decoding one image may take.

    Returns:
        A summary that JSON can hold; `already` says whether the folder was complete before.

    Raises:
        UserError: the source cannot be read, the folder holds something else, or writing failed.
    """
    require_local(folder, "DST")
    start = time.monotonic()
    source_folder, target_folder = open_folder(os.fspath(source), "the data set"), Path(folder)
    kind = catalog.detect_kind(source_folder, kind)
    if isinstance(source_folder, Path):
        check_disjoint(source_folder, target_folder)
    Target.open(target_folder, settings)  # a scan may take minutes: refuse before it
    opened = open_source(source_folder, kind, settings, progress, max_image_mib)
    result = prepare_source(opened, target_folder, settings, threads, progress)
    return result | {"seconds": time.monotonic() - start}


def open_source(folder: Folder, kind: str, settings: Settings, progress: Progress | None, max_image_mib: int) -> Source:
    """Return a data set to prepare, indexed; the arguments are those of `prepare_data_set`."""
    data = replace_fields(
        recipe.Data(shrink=settings.longest or 0, max_image_mib=max_image_mib),
        "data",
        {"source": kind, "path": str(folder)},
    )
    splits = open_index(data, _prefix_progress("indexing", progress))
    format_class_list(splits.classes)
    return Source(folder, kind, splits, _compute_digest(splits), data.max_image_bytes)


def prepare_source(
    source: Source, folder: Path, settings: Settings, threads: int = 0, progress: Progress | None = None
) -> JsonObject:
    """Prepare a data set that is indexed; return the summary of `prepare_data_set`, without seconds."""
    splits = source.splits
    with lock_folder(folder):
        target = Target.open(folder, settings).start(source.digest)
        already = target.finished
        if not already:
            _write_splits(splits, target, threads or count_usable_cores(), progress)
            catalog.store_beside("tar", folder, _prefix_progress("indexing", progress), source.max_image_bytes)
            _check_unchanged(splits, target, source.folder)
            target = target.finish()
    return summarize(source, target) | {"already": already}


# --- one image -----------------------------------------------------------------------------------------------------


def encode_sample(index: Index, sample: int, settings: Settings) -> EncodedImage:
    """Return a sample, of an index whose sizes are limited already, as it is stored."""
    if settings.raw:
        return EncodedImage(_encode_ppm(index.load_pixels(sample)), "ppm", "raw")
    if settings.quality is not None or index.needs_shrinking(np.array([sample]))[0]:
        return _encode_jpeg(index.load_pixels(sample), index.name(sample), settings)
    return _encode_lossless(index.read(sample), index.name(sample), index.max_image_bytes)


def _encode_lossless(data: bytes, name: str, max_bytes: int) -> EncodedImage:
    """Return the image tiled; or unchanged, if it can be decoded at all."""
    extension = _EXTENSIONS.get(data[:2], "")
    try:
        return EncodedImage(decode.tile_jpeg(data, max_bytes), "jpg", "tiled")
    except ValueError as error:
        decode.decode_image(data, name, max_bytes)
        why = f"JPEG: {re.sub(r'0x[0-9a-f]+|[0-9]+', 'N', str(error))}" if extension == "jpg" else extension
        return EncodedImage(data, extension, f"copied ({why})")


def _encode_jpeg(pixels: NDArray[np.uint8], name: str, settings: Settings) -> EncodedImage:
    height, width = pixels.shape[:2]
    if max(width, height) > MAX_SIDE:
        raise UserError(
            f"cannot encode {name}: it has {width}x{height} pixels and a JPEG at most {MAX_SIDE} a side; add --longest"
        )
    file, subsampling = io.BytesIO(), ":".join(settings.subsampling or SUBSAMPLING)
    Image.fromarray(pixels).save(file, "JPEG", quality=settings.quality or QUALITY, subsampling=subsampling)
    try:
        return EncodedImage(decode.tile_jpeg(file.getvalue()), "jpg", "encoded")
    except ValueError:
        return EncodedImage(file.getvalue(), "jpg", "encoded (not tiled)")


def _encode_ppm(pixels: NDArray[np.uint8]) -> bytes:
    return b"P6\n%d %d\n255\n" % pixels.shape[1::-1] + pixels.tobytes()


# --- all images ----------------------------------------------------------------------------------------------------


def _write_splits(splits: Splits, target: Target, threads: int, progress: Progress | None) -> None:
    """Write the samples of both splits that are missing."""
    write_classes(target.folder, splits.classes)
    total, before, report = len(splits.train) + len(splits.val), 0, _prefix_progress("preparing", progress)
    for split in SPLITS:
        index: Index = getattr(splits, split)
        with (
            _ShardWriter(split, index, target) as writer,
            closing(_encode_in_order(index, writer.next, target, threads)) as images,
        ):
            for image in images:
                writer.add(image)
                if report is not None:
                    report("images", before + writer.next, total)
        before += len(index)


class _ShardWriter:
    """Writer of the shards of a split; after an error, only complete shards are left."""

    def __init__(self, split: str, index: Index, target: Target) -> None:
        self.split, self.index, self.target = split, index, target
        self.next = target.count_samples(split)
        self._shard: Shard | None = None
        self._methods: Counter[str] = Counter()

    def add(self, image: EncodedImage) -> None:
        """Add the next sample."""
        space = self.target.settings.shard_mib * 2**20 - count_sample_bytes(image.data)
        if self._shard is not None and self._shard.bytes > space:
            self._finish(self._shard)
        if self._shard is None:
            name = format_shard_name(self.split, self.target.count_shards(self.split))
            self._shard = Shard(self.target.folder / name)
        assert self.index.files is not None
        names = self.index.files.table.names
        key = make_key(self.next, names[self.next] if len(names) else "")
        self._shard.add(key, image.extension, image.data, int(self.index.labels[self.next]))
        self._methods[image.method] += 1
        self.next += 1

    def _finish(self, shard: Shard) -> None:
        shard.finish()
        self.target.add(self.split, shard, self._methods)
        self._shard, self._methods = None, Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._shard is not None and error is None:
            self._finish(self._shard)
        elif self._shard is not None:
            self._shard.abandon()


def _encode_in_order(index: Index, first: int, target: Target, threads: int) -> Generator[EncodedImage, None, None]:
    """Yield the images from `first` on, in order, encoded by threads that are not far ahead of the consumer.

    The number of images and their bytes in work or waiting are bounded at any time; a single image may have any size.
    """
    assert index.files is not None
    costs = index.files.table.sizes[first:].astype(np.int64).prod(axis=1) * WORK_BYTES_PER_PIXEL
    queue: deque[tuple[Future[EncodedImage], int]] = deque()
    queued_bytes = 0
    with ThreadPoolExecutor(threads, "podscale-prepare") as pool:
        try:
            for sample, cost in enumerate(costs.tolist(), first):
                while queue and (len(queue) >= QUEUED_PER_THREAD * threads or queued_bytes + cost > QUEUED_BYTES):
                    future, freed = queue.popleft()
                    yield future.result()
                    queued_bytes -= freed
                queue.append((pool.submit(encode_sample, index, sample, target.settings), cost))
                queued_bytes += cost
            while queue:
                yield queue.popleft()[0].result()
        finally:
            for future, _ in queue:
                future.cancel()


def _prefix_progress(verb: str, progress: Progress | None) -> Progress | None:
    """Return progress that names the activity before the unit: "indexing files"."""
    return None if progress is None else lambda unit, done, total: progress(f"{verb} {unit}", done, total)


# --- the whole data set --------------------------------------------------------------------------------------------


def _compute_digest(splits: Splits) -> str:
    """Return a digest that identifies a source: every sample's position, bytes, size and label, and the class names."""
    digest = hashlib.sha256(json.dumps(splits.classes).encode())
    for split in SPLITS:
        files: Files = getattr(splits, split).files
        digest.update(json.dumps(files.table.paths).encode())
        for name in ("labels", "sizes", "files", "offsets", "lengths"):
            digest.update(np.ascontiguousarray(getattr(files.table, name)).data)
        digest.update(files.table.names.blob.tobytes())
    return digest.hexdigest()


def _check_unchanged(splits: Splits, target: Target, source: Folder) -> None:
    """Refuse shards in which a sample's label or size differs from the source."""
    stored = table.load_tables(target.folder / catalog.INDEX_FILE)
    pairs = [] if stored is None else [(getattr(stored, split), getattr(splits, split)) for split in SPLITS]
    same = [np.array_equal(a.labels, b.labels) and np.array_equal(a.sizes, b.sizes) for a, b in pairs]
    if stored is None or stored.classes != splits.classes or not all(same):
        raise UserError(f"{source} has changed while it was prepared; remove {target.folder} and prepare it again")


def summarize(source: Source, target: Target) -> JsonObject:
    """Return what was prepared, as JSON can hold it."""
    splits = source.splits
    shards = [shard for split in SPLITS for shard in target.finished_shards[split]]
    methods: Counter[str] = Counter()
    for shard in shards:
        methods.update(shard["how"])
    bytes_in = sum(int(getattr(splits, split).count_encoded_bytes().sum()) for split in SPLITS)
    bytes_out = sum(shard["bytes"] for shard in shards)
    return {
        "prepared": str(target.folder),
        "source": source.kind,
        "classes": len(splits.classes),
        "images": {split: len(getattr(splits, split)) for split in SPLITS},
        "shards": len(shards),
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "ratio": bytes_out / bytes_in,
        "how": dict(methods.most_common()),
    }
