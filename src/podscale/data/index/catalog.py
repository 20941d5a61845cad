"""Catalog: the table of a data set on disk, scanned once and kept until the data changes.

A table is kept beside the data (`.podscale-index`, which `store_beside` writes) or else in the user's cache folder, and
is used only if its fingerprint is that of the data as it is now. To take one costs a listing of the class folders or of
the shards, never a look at every picture. Several processes may scan and keep the same table at once: files appear
whole, and the last one stays.
"""

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from podscale.config.fields import add_choice
from podscale.data.files import THREADS, Files, Progress
from podscale.data.index import table as tables
from podscale.data.index.containers import folder, parquet, tar, tfrecord
from podscale.data.index.containers.container import Format, Found, Part, resolved
from podscale.data.index.table import SPLITS, Strings, Table, Tables
from podscale.errors import UserError

FORMATS: dict[str, Format] = {
    "folder": folder.FORMAT,
    "tar": tar.FORMAT,
    "tfrecord": tfrecord.FORMAT,
    "parquet": parquet.FORMAT,
}
BESIDE = ".podscale-index"
PREPARED = "prepare.json"  # what `target` keeps where a data set is being prepared
SETTLED_NS = 2 * 10**9  # file systems' clocks tick; what changed just now may change again without being seen


def register(name: str, form: Format) -> None:
    """Makes another kind of data set available to recipes, as `data.source`."""
    if name in FORMATS or name in ("digits", "npz", "cifar", "mnist"):
        raise UserError(f"there is already a data source {name!r}; choose another name")
    FORMATS[name] = form
    add_choice("data.source", name)


def kind_of(root: Path, said: str = "") -> str:
    """The kind of the data set in a folder: what it is said to be, else what it can be read as, if only one way."""
    if root.is_file():
        raise UserError(f"{root} is a file; name a folder that holds train/CLASS/FILE and val/CLASS/FILE, or shards")
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; check the path")
    _check_whole(root)
    if said:
        return said
    kinds = [kind for kind in FORMATS if _holds(kind, root)]
    if len(kinds) > 1:
        raise UserError(f"{root} can be read as {' and as '.join(kinds)}; choose one with --source")
    if not kinds:
        raise UserError(
            f"{root} holds neither {folder.LAYOUT}, nor CLASS/FILE alone, nor shards of both splits (train*, val*) "
            "in tar, tfrecord or parquet files; check the path, or say with --source what it should hold"
        )
    return kinds[0]


def _holds(kind: str, root: Path) -> bool:
    try:
        FORMATS[kind].find(root)
    except UserError:
        return False
    return True


def open_files(kind: str, root: Path, progress: Progress | None = None) -> tuple[Files, Files, tuple[str, ...]]:
    """The files of both splits and the names of the classes: from a kept table if it is up to date, else scanned."""
    _check_whole(root)
    found = FORMATS[kind].find(root)
    kept = _kept(kind, found)
    if kept is None:
        kept = scan(kind, found, progress)
        if time.time_ns() - found.newest_ns > SETTLED_NS and FORMATS[kind].find(root) == found:
            with suppress(OSError):  # without a cache folder the table lives in memory alone
                tables.save(_cache_file(kind, root), kept)
    return _files(kind, root, kept.train), _files(kind, root, kept.val), kept.classes


def listed(
    kind: str, root: Path, progress: Progress | None = None
) -> tuple[dict[str, Files], tuple[str, ...], list[tuple[str, str, str]]]:
    """All samples, without a look at any: the files by split, which are not measured, and the names of the classes.

    Places that cannot be scanned are left out, and told: split, place, and why.
    """
    _check_whole(root)
    form, found, left_out = FORMATS[kind], FORMATS[kind].find(root), list[tuple[str, str, str]]()

    def scanned(place: str) -> Part | str:
        try:
            return form.scan(os.path.join(root, place))
        except UserError as error:
            return str(error)

    parts: dict[str, dict[str, Part]] = {}
    with ThreadPoolExecutor(THREADS, "podscale-scan") as pool:
        for split, places in found.places.items():
            parts[split] = {}
            for place, part in zip(places, pool.map(scanned, places), strict=True):
                if isinstance(part, str):
                    left_out.append((split, os.path.join(root, place), part))
                else:
                    parts[split][place] = part
                if progress is not None:
                    progress("files" if form.packed else "folders", len(parts[split]), len(places))
            if not parts[split]:
                raise UserError(left_out[0][2])
    try:
        classes, labels = resolved(found, {split: list(of_split.values()) for split, of_split in parts.items()})
    except UserError as error:
        raise (UserError(left_out[0][2]) if left_out else error) from None  # what was left out may be all that is wrong
    tables_ = {split: _table(tuple(parts[split]), list(parts[split].values()), labels[split]) for split in SPLITS}
    return {split: _files(kind, root, table) for split, table in tables_.items()}, classes, left_out


def _check_whole(root: Path) -> None:
    """Refuses what is only partly prepared; it would pass for a smaller data set."""
    try:
        content = json.loads((root / PREPARED).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(content, dict) and content.get("finished") is False:
        raise UserError(
            f"{root} is prepared only in part; repeat podscale data prepare, which goes on where it stopped"
        )


def store_beside(kind: str, root: Path, progress: Progress | None = None) -> Path:
    """Scans a data set and keeps its table beside it, to travel with it: no one has to scan it again.

    Where samples are in shards, the table holds as long as their names and lengths do; copying may change their times.
    """
    found = FORMATS[kind].find(root)
    table = replace(scan(kind, found, progress), fingerprint=found.portable)
    try:
        tables.save(root / BESIDE, table)
    except OSError as error:
        raise UserError(f"cannot write {root / BESIDE}: {error.strerror}; check its permissions") from error
    return root / BESIDE


def _files(kind: str, root: Path, table: Table) -> Files:
    return Files(str(root), table, FORMATS[kind].packed)


# --- what is kept --------------------------------------------------------------------------------------------------


def _kept(kind: str, found: Found) -> Tables | None:
    for path, fingerprint in (
        (found.root / BESIDE, found.portable),
        (_cache_file(kind, found.root), found.fingerprint),
    ):
        kept = tables.load(path)
        if (
            kept is not None
            and (kept.kind, kept.fingerprint) == (kind, fingerprint)
            and all(
                getattr(kept, split).places == found.places[split] for split in SPLITS
            )  # and so nothing else is read
            and all(FORMATS[kind].packed or len(getattr(kept, split).names) for split in SPLITS)
        ):
            return kept
    return None


def _cache_file(kind: str, root: Path) -> Path:
    """Where the table of a data set is kept: $XDG_CACHE_HOME, or ~/.cache, and a digest of the data set's place."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    place = f"{kind}\0{os.path.abspath(root)}".encode("utf-8", "surrogateescape")
    return cache / "podscale" / "index" / hashlib.sha256(place).hexdigest()[:32]


# --- scanning ------------------------------------------------------------------------------------------------------


def scan(kind: str, found: Found, progress: Progress | None = None) -> Tables:
    """Looks at every place and at every picture's header, in parallel."""
    parts = _parts(FORMATS[kind], found, progress)
    classes, labels = resolved(found, parts)
    total = sum(map(len, labels.values()))
    done, measured = 0, {}
    for split in SPLITS:

        def tell(what: str, part: int, _: int, before: int = done) -> None:
            if progress is not None:
                progress(what, before + part, total)

        table = _table(found.places[split], parts.pop(split), labels[split])
        sizes, lengths = _files(kind, found.root, table).measure(tell)
        measured[split] = replace(table, sizes=sizes, lengths=lengths)
        done += len(table)
    return Tables(kind, found.fingerprint, classes, **measured)


def _parts(form: Format, found: Found, progress: Progress | None) -> dict[str, list[Part]]:
    places = [os.path.join(found.root, place) for split in SPLITS for place in found.places[split]]
    parts: list[Part] = []
    with ThreadPoolExecutor(THREADS, "podscale-scan") as pool:
        for part in pool.map(form.scan, places):
            parts.append(part)
            if progress is not None:
                progress("files" if form.packed else "folders", len(parts), len(places))
    first = len(found.places["train"])
    return {"train": parts[:first], "val": parts[first:]}


def _table(places: tuple[str, ...], parts: list[Part], labels: np.ndarray) -> Table:
    counts = [len(part.labels) for part in parts]
    return Table(
        labels,
        np.zeros((len(labels), 2), np.int32),
        np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        np.concatenate([part.offsets for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        Strings.joined([part.names for part in parts]),
        places,
    )
