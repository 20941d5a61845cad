"""Survey: what a data set holds, in numbers, from its index alone: splits, classes, sizes, bytes, kinds of files."""

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from podscale import recipe
from podscale.config.fields import replace_fields
from podscale.data.files import Progress
from podscale.data.index import catalog
from podscale.data.index.containers import folder, raw
from podscale.data.index.dataset import Index, open_index
from podscale.data.index.table import SPLITS, Strings
from podscale.errors import UserError

HELD = ("npz", "cifar", "mnist")  # kinds that are held in memory whole


def survey(path: str, kind: str = "", progress: Progress | None = None) -> dict[str, Any]:
    """What the data set in a folder holds. Its index is made and kept as training would; `kept` says it was before."""
    began, scanned = time.monotonic(), False

    def tell(what: str, done: int, total: int) -> None:
        nonlocal scanned
        scanned = True
        if progress is not None:
            progress(what, done, total)

    if kind not in HELD:
        kind = ("" if kind else _held_kind(Path(path))) or catalog.kind_of(Path(path), kind)
    splits = open_index(replace_fields(recipe.Data(), "data", {"source": kind, "path": path}), tell)
    seconds = time.monotonic() - began
    return {
        "path": path,
        "source": kind,
        "classes": list(splits.classes),
        "unsplit": kind == "folder" and bool(folder.unsplit_classes(Path(path))),
        "splits": {split: _facts(getattr(splits, split), len(splits.classes)) for split in SPLITS},
        "kept": not scanned,
        "seconds": seconds,
    }


def _held_kind(path: Path) -> str:
    """The kind of a data set that is held in memory whole; empty if it is none of them."""
    if path.suffix == ".npz" and path.is_file():
        return "npz"
    finders = {"cifar": raw.cifar_files, "mnist": raw.mnist_files}
    return next((kind for kind, find in finders.items() if path.is_dir() and _finds(find, path)), "")


def _finds(find: Callable[[Path], object], path: Path) -> bool:
    try:
        find(path)
    except UserError as error:
        if "pickled" in str(error):
            raise
        return False
    return True


def _facts(index: Index, classes: int) -> dict[str, Any]:
    per_class = np.bincount(index.labels, minlength=classes)
    by_area = np.argsort(index.sizes.astype(np.int64).prod(axis=1), kind="stable")
    ranks = {"smallest": 0, "median": (len(index) - 1) // 2, "largest": len(index) - 1}
    return {
        "pictures": len(index),
        "bytes": int((index.decoded_bytes() if index.files is None else index.encoded_bytes()).sum()),
        "sizes": {rank: index.sizes[by_area[place]].tolist() for rank, place in ranks.items()},
        "extensions": extensions(index.files.table.names) if index.files is not None else {},
        "pictures_per_class": {"fewest": int(per_class.min()), "most": int(per_class.max())},
        "class_counts": per_class.tolist(),
    }


def extensions(names: Strings) -> dict[str, int]:
    """How many names end how, the most frequent first; nothing where samples have no names.

    >>> extensions(Strings.of(["a.jpg", "b.JPG", "c.d.png"]))
    {'.jpg': 2, '.png': 1}
    """
    text = names.blob.tobytes()
    found = Counter(text[start:stop].rpartition(b".")[2].lower() for start, stop in pairwise(names.starts.tolist()))
    return {f".{end.decode('utf-8', 'replace')}": count for end, count in found.most_common()}
