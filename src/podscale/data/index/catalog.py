"""Scan data sets on disk, and store their tables until the data changes.

A table is stored beside the data (`.podscale-index`, which `store_beside` writes) or else in the user's cache folder,
and is used only if its fingerprint matches the data on disk. To check that costs a listing of the class folders or of
the shards, never a look at every image. Several processes may scan and store the same table at once: files are written
atomically, and the last one stays.
"""

import hashlib
import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from podscale.config.fields import add_choice
from podscale.config.registry import Registry
from podscale.data.bucket.files import BucketFiles, BucketSplit
from podscale.data.files import THREADS, Files, Progress
from podscale.data.index import table as tables
from podscale.data.index.bucket_index import INDEX_FILE, JOURNAL_FILE, BucketIndex, Share, list_etags
from podscale.data.index.containers import folder, parquet, tar, tfrecord
from podscale.data.index.containers.container import ContainerSamples, Format, Listing, resolve_labels
from podscale.data.index.containers.entries import Folder, list_visible, read_file_text
from podscale.data.index.containers.sources import BucketContainer
from podscale.data.index.table import SPLITS, Strings, Table, Tables
from podscale.data.limits import MAX_IMAGE_BYTES
from podscale.errors import StorageError, UserError
from podscale.storage.bucket_path import BucketPath
from podscale.storage.user_cache import get_user_cache

FORMATS: Registry[Format] = Registry(
    "data source",
    {"folder": folder.FORMAT, "tar": tar.FORMAT, "tfrecord": tfrecord.FORMAT, "parquet": parquet.FORMAT},
)
BUCKET_THREADS = 160  # that scan shards; each waits for one answer at a time: 5,300 a second at 30 ms, as S3 allows
SHARD_ENDINGS = MappingProxyType({"tar": ".tar", "tfrecord": ".tfrecord", "parquet": ".parquet"})
MAX_JOURNAL_BYTES = 2**28
MAX_WARNINGS = 3
MIN_AGE_NS = 2 * 10**9  # file systems' clocks are coarse: data that changed just now may change again unnoticed


def register_format(name: str, form: Format) -> None:
    """Make another kind of data set available to recipes, as `data.source`."""
    if name in FORMATS or name in ("digits", "npz", "cifar", "mnist"):
        raise UserError(f"there is already a data source {name!r}; choose another name")
    FORMATS.add(name, form)
    add_choice("data.source", name)


def detect_kind(root: Folder, kind: str = "") -> str:
    """Return the kind of the data set in a folder: `kind` if given, else the only kind that it can be read as.

    Raises:
        UserError: there is no such folder, it is only partly prepared, or it can be read as no kind or as several.
    """
    if root.is_file():
        raise UserError(f"{root} is a file; name a folder that holds train/CLASS/FILE and val/CLASS/FILE, or shards")
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; check the path")
    _check_complete(root)
    if kind:
        return kind
    kinds = [kind for kind in FORMATS if _can_read_as(kind, root)]
    if len(kinds) > 1:
        raise UserError(
            f"{root} can be read as {' and as '.join(kinds)}; choose one with --source (--data.source in training)"
        )
    return kinds[0] if kinds else _explain_kind(root)


def _explain_kind(root: Folder) -> str:
    """Raise the error of the kind that a folder most likely is meant to be: that of its shards, or an image folder."""
    names = [entry.name for folder in (root, root / "train") if folder.is_dir() for entry in list_visible(folder)]
    shards = next((kind for kind, ending in SHARD_ENDINGS.items() if any(ending in name for name in names)), "folder")
    FORMATS[shards].find(root)
    raise UserError(f"{root} is not a data set that Podscale can read; it must hold {folder.LAYOUT}, or shards")


def _can_read_as(kind: str, root: Folder) -> bool:
    try:
        FORMATS[kind].find(root)
    except StorageError:
        raise
    except UserError:
        return False
    return True


def open_files(
    kind: str,
    root: Folder,
    progress: Progress | None = None,
    max_image_bytes: int = MAX_IMAGE_BYTES,
    share: Share | None = None,
) -> tuple[Files, Files, tuple[str, ...], tuple[str, ...]]:
    """Return the files of both splits, the class names, and warnings about what was skipped.

    They come from a stored table if it is up to date, else from a scan. An image whose header cannot be read has size
    0 x 0 in the table. With `share`, one process asks a bucket, for all.
    """

    def open_bucket() -> BucketIndex:
        result, listing = _open_tables(kind, root, progress, max_image_bytes)
        return BucketIndex(
            result, list_etags(listing, result, FORMATS[kind].packed), _describe_skipped(listing, result)
        )

    if isinstance(root, BucketPath):
        index = open_bucket() if share is None else BucketIndex.parse(share(lambda: open_bucket().format()))
        remote = [_make_bucket_files(root, index, split, max_image_bytes) for split in SPLITS]
        return remote[0], remote[1], index.tables.classes, index.warnings
    result, listing = _open_tables(kind, root, progress, max_image_bytes)
    train, val = (_make_files(kind, root, table, max_image_bytes) for table in (result.train, result.val))
    return train, val, result.classes, _describe_skipped(listing, result)


def _open_tables(kind: str, root: Folder, progress: Progress | None, max_image_bytes: int) -> tuple[Tables, Listing]:
    _check_complete(root)
    listing = FORMATS[kind].find(root)
    result = _load_stored_tables(kind, listing)
    if result is None:
        result = scan_data_set(kind, listing, progress, max_image_bytes)
        if time.time_ns() - listing.newest_ns > MIN_AGE_NS and FORMATS[kind].find(root) == listing:
            with suppress(OSError):  # without a cache folder the table is in memory only
                tables.save_tables(_get_cache_path(kind, root), result)
    return result, listing


class UnusedPart(NamedTuple):
    """A part of a data set of which no sample is used, and why."""

    kind: str  # "unreadable" or "empty class"
    split: str
    path: str
    why: str


def list_samples(
    kind: str, root: Folder, progress: Progress | None = None, max_image_bytes: int = MAX_IMAGE_BYTES
) -> tuple[dict[str, Files], tuple[str, ...], list[UnusedPart]]:
    """List all samples without opening their images.

    Containers that cannot be scanned are left out and reported, and so are entries that are no files.

    Returns:
        The files by split, which are not measured; the class names; and everything that was left out.
    """
    _check_complete(root)
    form, listing, left_out = FORMATS[kind], FORMATS[kind].find(root), list[UnusedPart]()

    def scan(path: str) -> ContainerSamples | str:
        try:
            return form.scan(_name_container(root, path, max_image_bytes))
        except StorageError:
            raise
        except UserError as error:
            return str(error)

    containers: dict[str, dict[str, ContainerSamples]] = {}
    with ThreadPoolExecutor(THREADS, "podscale-scan") as pool:
        for split, paths in listing.paths.items():
            containers[split] = {}
            for path, samples in zip(paths, pool.map(scan, paths), strict=True):
                if isinstance(samples, str):
                    left_out.append(UnusedPart("unreadable", split, str(root / path), samples))
                else:
                    containers[split][path] = samples
                if progress is not None:
                    progress("files" if form.packed else "folders", len(containers[split]), len(paths))
            if not containers[split]:
                raise UserError(left_out[0].why)
    lists = {split: list(by_path.values()) for split, by_path in containers.items()}
    try:
        classes, labels = resolve_labels(listing, lists)
    except UserError as error:
        raise (UserError(left_out[0].why) if left_out else error) from None  # a container left out may be the cause
    left_out += _list_ignored(listing, lists)
    tables = {split: _make_table(tuple(containers[split]), lists[split], labels[split]) for split in SPLITS}
    if isinstance(root, BucketPath):
        listed = replace(listing, paths={split: tuple(containers[split]) for split in SPLITS})
        both = Tables(kind, listing.fingerprint, classes, tables["train"], tables["val"])
        index = BucketIndex(both, list_etags(listed, both, form.packed), ())
        return {split: _make_bucket_files(root, index, split, max_image_bytes) for split in SPLITS}, classes, left_out
    files = {split: _make_files(kind, root, tables[split], max_image_bytes) for split in SPLITS}
    return files, classes, left_out


def _list_ignored(listing: Listing, samples: dict[str, list[ContainerSamples]]) -> list[UnusedPart]:
    """Return the entries that are no images, and the class folders without any."""
    entries = [
        UnusedPart("unreadable", split, path, why)
        for split in SPLITS
        for container in samples[split]
        for path, why in container.ignored
    ]
    folders = [(path, listing.root / path) for path in listing.skipped]
    return entries + [
        UnusedPart(
            "empty class", "val" if path.startswith("val/") else "train", str(full), folder.describe_skipped_class(full)
        )
        for path, full in folders
    ]


def _describe_skipped(listing: Listing, result: Tables) -> tuple[str, ...]:
    """Return warnings about files of other formats and each class folder without images; one sentence if many."""
    counts = result.other_formats
    ignored = [folder.describe_other_formats(str(listing.root), counts)] if counts else []
    paths = [listing.root / path for path in listing.skipped]
    if len(paths) <= MAX_WARNINGS:
        return (*ignored, *(folder.describe_skipped_class(path) for path in paths))
    names = ", ".join(listing.skipped[:MAX_WARNINGS])
    skipped = f"{len(paths)} class folders of {listing.root} hold no images and are skipped: {names}, ..."
    if kinds := {extension for path in paths for extension in folder.list_other_formats(path)}:
        skipped += f"; some hold {' '.join(sorted(kinds))} files, which cannot be read; {folder.CONVERT}"
    return (*ignored, skipped)


def _check_complete(root: Folder) -> None:
    """Refuse a folder that is only partly prepared; it would pass for a smaller data set."""
    try:
        content = json.loads(read_file_text(root / JOURNAL_FILE, MAX_JOURNAL_BYTES))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return
    except OSError as error:
        raise UserError(f"cannot read {root / JOURNAL_FILE}: {error.strerror}; remove it if it is not yours") from None
    if isinstance(content, dict) and content.get("finished") is False:
        raise UserError(f"{root} is only partly prepared; run `podscale data prepare` again to finish it")


def store_beside(
    kind: str, root: Folder, progress: Progress | None = None, max_image_bytes: int = MAX_IMAGE_BYTES
) -> Folder:
    """Scan a data set and store its table beside it, to be copied with it: nobody has to scan it again.

    Where samples are in shards, the table stays valid while their names and lengths do; a copy may change their times.

    Returns:
        The path of the stored table.
    """
    listing = FORMATS[kind].find(root)
    table = replace(scan_data_set(kind, listing, progress, max_image_bytes), fingerprint=listing.portable_fingerprint)
    path = root / INDEX_FILE
    try:
        if isinstance(path, BucketPath):
            path.store.write(path.key, tables.format_tables(table))
        else:
            tables.save_tables(path, table)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; check its permissions") from error
    return path


def _make_files(kind: str, root: Path, table: Table, max_image_bytes: int) -> Files:
    return Files(str(root), table, FORMATS[kind].packed, max_image_bytes)


def _make_bucket_files(root: BucketPath, index: BucketIndex, split: str, max_image_bytes: int) -> BucketFiles:
    table: Table = getattr(index.tables, split)
    place = BucketSplit(root, index.identify(root), split, index.etags[split], np.arange(len(table)))
    return BucketFiles(table, FORMATS[index.tables.kind].packed, place, max_image_bytes)


def _name_container(root: Folder, path: str, max_image_bytes: int) -> str | BucketContainer:
    """Return a container as `Format.scan` takes it."""
    if isinstance(root, BucketPath):
        return BucketContainer(root / path, max_image_bytes)
    return os.path.join(root, path)


# --- stored tables -------------------------------------------------------------------------------------------------


def _load_stored_tables(kind: str, listing: Listing) -> Tables | None:
    for path, fingerprint in (
        (listing.root / INDEX_FILE, listing.portable_fingerprint),
        (_get_cache_path(kind, listing.root), listing.fingerprint),
    ):
        result = _load_tables(path)
        if (
            result is not None
            and (result.kind, result.fingerprint) == (kind, fingerprint)
            # The same paths as the listing's, so that no other files are read.
            and all(getattr(result, split).paths == listing.paths[split] for split in SPLITS)
            and all(FORMATS[kind].packed or len(getattr(result, split).names) for split in SPLITS)
        ):
            return result
    return None


def _load_tables(path: Folder) -> Tables | None:
    if not isinstance(path, BucketPath):
        return tables.load_tables(path)
    return tables.parse_tables(path.read()) if path.is_file() else None


def _get_cache_path(kind: str, root: Folder) -> Path:
    """Return the cache file of a data set: in $XDG_CACHE_HOME or ~/.cache, named by a digest of the data set's path."""
    place = root if isinstance(root, BucketPath) else os.path.abspath(root)
    key = f"{kind}\0{place}".encode("utf-8", "surrogateescape")
    return get_user_cache("index") / hashlib.sha256(key).hexdigest()[:32]


# --- scanning ------------------------------------------------------------------------------------------------------


def scan_data_set(
    kind: str, listing: Listing, progress: Progress | None = None, max_image_bytes: int = MAX_IMAGE_BYTES
) -> Tables:
    """Scan every container and read every image's header, in parallel."""
    containers = _scan_containers(FORMATS[kind], listing, progress, max_image_bytes)
    classes, labels = resolve_labels(listing, containers)
    others = Counter(
        extension for split in SPLITS for samples in containers[split] for extension in samples.other_formats
    )
    total = sum(map(len, labels.values()))
    done, measured = 0, {}
    for split in SPLITS:

        def report(unit: str, count: int, _: int, before: int = done) -> None:
            if progress is not None:
                progress(unit, before + count, total)

        scanned = containers.pop(split)
        table = _make_table(listing.paths[split], scanned, labels[split])
        if any(samples.sizes is None for samples in scanned):
            table = _measure_images(kind, listing, split, table, report, max_image_bytes)
        measured[split] = table
        done += len(table)
    return Tables(kind, listing.fingerprint, classes, **measured, other_formats=dict(others))


def _measure_images(
    kind: str, listing: Listing, split: str, table: Table, report: Progress, max_image_bytes: int
) -> Table:
    """Return a table with the sizes of its images, from their headers, and their bytes."""
    files: Files
    if isinstance(listing.root, BucketPath):
        samples = Tables(kind, listing.fingerprint, (), table, table)
        etags = list_etags(replace(listing, paths=dict.fromkeys(SPLITS, table.paths)), samples, FORMATS[kind].packed)
        files = _make_bucket_files(listing.root, BucketIndex(samples, etags, ()), split, max_image_bytes)
    else:
        files = _make_files(kind, listing.root, table, max_image_bytes)
    sizes, lengths = files.measure(report, tolerant=True)
    return replace(table, sizes=sizes, lengths=lengths)


def _scan_containers(
    form: Format, listing: Listing, progress: Progress | None, max_image_bytes: int
) -> dict[str, list[ContainerSamples]]:
    paths = [_name_container(listing.root, path, max_image_bytes) for split in SPLITS for path in listing.paths[split]]
    containers: list[ContainerSamples] = []
    threads = BUCKET_THREADS if isinstance(listing.root, BucketPath) else THREADS
    with ThreadPoolExecutor(threads, "podscale-scan") as pool:
        for samples in pool.map(form.scan, paths):
            containers.append(samples)
            if progress is not None:
                progress("files" if form.packed else "folders", len(containers), len(paths))
    first_val = len(listing.paths["train"])
    return {"train": containers[:first_val], "val": containers[first_val:]}


def _make_table(paths: tuple[str, ...], containers: list[ContainerSamples], labels: np.ndarray) -> Table:
    counts = [len(samples.labels) for samples in containers]
    return Table(
        labels,
        np.concatenate([_get_sizes(samples) for samples in containers]),
        np.repeat(np.arange(len(containers), dtype=np.int32), counts),
        np.concatenate([samples.offsets for samples in containers]),
        np.concatenate([samples.lengths for samples in containers]),
        Strings.concatenate([samples.names for samples in containers]),
        paths,
    )


def _get_sizes(samples: ContainerSamples) -> np.ndarray:
    return np.zeros((len(samples.labels), 2), np.int32) if samples.sizes is None else samples.sizes
