"""Summarize a data set from its index alone: splits, classes, sizes, bytes, kinds of files."""

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from podscale import recipe
from podscale.config.fields import replace_fields
from podscale.config.json_types import JsonObject
from podscale.data.files import Progress
from podscale.data.index import catalog
from podscale.data.index.bucket_index import open_folder
from podscale.data.index.containers import folder, raw
from podscale.data.index.dataset import Index, check_classes, open_index
from podscale.data.index.table import SPLITS, Strings
from podscale.errors import UserError
from podscale.storage.locations import has_scheme

IN_MEMORY_KINDS = ("npz", "cifar", "mnist")  # kinds that are loaded into memory


def survey_data_set(
    path: str, kind: str = "", progress: Progress | None = None, max_image_mib: int = recipe.Data.max_image_mib
) -> JsonObject:
    """Summarize the data set in a folder. Its index is made and stored as training would.

    Args:
        path: folder of the data set, or an .npz file.
        kind: a `data.source`; detected if empty.
        progress: called during a scan with what is counted, how many are done, and of how many.
        max_image_mib: memory that decoding one image may take.

    Returns:
        A summary that JSON can hold; `kept` says whether the index was stored before.
    """
    start, scanned = time.monotonic(), False

    def report(unit: str, done: int, total: int) -> None:
        nonlocal scanned
        scanned = True
        if progress is not None:
            progress(unit, done, total)

    if kind not in IN_MEMORY_KINDS:
        in_memory = "" if kind or has_scheme(path) else _detect_in_memory_kind(Path(path))
        kind = in_memory or catalog.detect_kind(open_folder(path, "the data set"), kind)
    data = replace_fields(
        recipe.Data(max_image_mib=max_image_mib), "data", {"source": kind, "path": path, "bad_share": 1.0}
    )
    splits = open_index(data, report)
    check_classes(splits, data)
    seconds = time.monotonic() - start
    return {
        "path": path,
        "source": kind,
        "classes": list(splits.classes),
        "unsplit": kind == "folder" and bool(folder.find_unsplit_classes(open_folder(path))),
        "splits": {split: _summarize_split(getattr(splits, split), len(splits.classes)) for split in SPLITS},
        "warnings": list(splits.warnings),
        "kept": not scanned,
        "seconds": seconds,
    }


def _detect_in_memory_kind(path: Path) -> str:
    """Return the kind of a data set that is loaded into memory; empty if it is none of these."""
    if path.suffix == ".npz" and path.is_file():
        return "npz"
    finders = {"cifar": raw.find_cifar_files, "mnist": raw.find_mnist_files}
    return next((kind for kind, find in finders.items() if path.is_dir() and _can_find(find, path)), "")


def _can_find(find: Callable[[Path], object], path: Path) -> bool:
    try:
        find(path)
    except UserError as error:
        if "pickled" in str(error):
            raise
        return False
    return True


def _summarize_split(index: Index, classes: int) -> JsonObject:
    per_class = np.bincount(index.labels, minlength=classes)
    unreadable = index.list_unreadable()
    by_area = np.argsort(index.sizes.astype(np.int64).prod(axis=1), kind="stable")
    by_area = by_area[~np.isin(by_area, unreadable)] if len(unreadable) < len(index) else by_area
    ranks = {"smallest": 0, "median": (len(by_area) - 1) // 2, "largest": len(by_area) - 1}
    return {
        "images": len(index),
        "bytes": int((index.count_decoded_bytes() if index.files is None else index.count_encoded_bytes()).sum()),
        "sizes": {rank: index.sizes[by_area[position]].tolist() for rank, position in ranks.items()},
        "extensions": count_extensions(index.files.table.names) if index.files is not None else {},
        "images_per_class": {"fewest": int(per_class.min()), "most": int(per_class.max())},
        "class_counts": per_class.tolist(),
        "unreadable": [index.name(sample) for sample in unreadable],
    }


def count_extensions(names: Strings) -> dict[str, int]:
    """Return the number of names by extension, most frequent first; empty if samples have no names.

    >>> count_extensions(Strings.from_names(["a.jpg", "b.JPG", "c.d.png"]))
    {'.jpg': 2, '.png': 1}
    """
    text = names.blob.tobytes()
    counts = Counter(text[start:stop].rpartition(b".")[2].lower() for start, stop in pairwise(names.starts.tolist()))
    return {f".{end.decode('utf-8', 'replace')}": count for end, count in counts.most_common()}
