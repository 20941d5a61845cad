"""Data sets in buckets: their folder, and an index with the ETags of what was indexed, which can be sent.

A web server lists nothing, so a data set there needs the index that `podscale data prepare` stores beside it.
"""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from podscale.data.index.containers.container import CLASSES_FILE, Listing
from podscale.data.index.containers.entries import Folder
from podscale.data.index.table import SPLITS, Strings, Table, Tables, format_tables, parse_tables
from podscale.errors import UserError
from podscale.storage.bucket_path import LISTING_THREADS, BucketPath, explain_store_errors
from podscale.storage.locations import parse_location
from podscale.storage.open import open_store
from podscale.storage.store import FolderListing, ObjectInfo

INDEX_FILE = ".podscale-index"  # the table that is stored beside a data set
JOURNAL_FILE = "prepare.json"  # written by `podscale.data.tools.target` in the folder that a data set is prepared in
# Runs a function in one process, and returns the bytes that it returned there in all processes.
Share = Callable[[Callable[[], bytes]], bytes]


def open_folder(path: str, option: str = "") -> Folder:
    """Return the folder of a data set, on disk or in a bucket. Nothing is read yet, except from a web server.

    Raises:
        UserError: the scheme is not supported, or a web server has no index.
    """
    location = parse_location(path, option)
    if location.is_local:
        return Path(location.key)
    folder = BucketPath(open_store(location), location)
    if not location.is_writable:
        _list_web_server(folder)
    return folder


def has_stored_index(path: str) -> bool:
    """Return whether the index of a data set in a bucket is stored beside it.

    Raises:
        UserError: the bucket cannot be read.
    """
    with explain_store_errors():
        try:
            open_store(path).stat(INDEX_FILE)
        except FileNotFoundError:
            return False
    return True


def _list_web_server(root: BucketPath) -> None:
    """Fill in the listings of a data set on a web server, by the index beside it and the state of every file."""
    try:
        tables = parse_tables(root.store.read(INDEX_FILE))
    except FileNotFoundError:
        raise UserError(
            f"{root} has no {INDEX_FILE}, and a web server lists no files; prepare it with podscale data prepare, "
            "or use s3://, gs:// or az://"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {root / INDEX_FILE}: {error.strerror}") from None
    if tables is None:
        raise UserError(f"{root / INDEX_FILE} is damaged; prepare the data set again")
    keys = sorted({key for table in (tables.train, tables.val) for key in _list_keys(table)})

    def stat(key: str) -> ObjectInfo | None:
        try:
            return root.store.stat(key)
        except FileNotFoundError:
            return None

    with explain_store_errors(), ThreadPoolExecutor(LISTING_THREADS, "podscale-list") as pool:
        infos = [info for info in pool.map(stat, [*keys, INDEX_FILE, CLASSES_FILE, JOURNAL_FILE]) if info]
    folders: dict[str, list[ObjectInfo]] = {"": []}
    for info in infos:
        folders.setdefault(info.key.rpartition("/")[0], []).append(info)
    for key in list(folders):
        while key := key.rpartition("/")[0]:
            folders.setdefault(key, [])
    for key, objects in folders.items():
        names = sorted(other.rpartition("/")[2] for other in folders if other and other.rpartition("/")[0] == key)
        root.listings[key] = FolderListing(tuple(names), tuple(sorted(objects, key=lambda info: info.key)))


def _list_keys(table: Table) -> list[str]:
    """Return the objects that hold a table's samples: shards, or the images of class folders."""
    if not table.offsets.any() and len(table.names):
        return [f"{table.paths[file]}/{table.names[i]}" for i, file in enumerate(table.files.tolist())]
    return list(table.paths)


@dataclass(frozen=True)
class BucketIndex:
    """The index of a data set in a bucket.

    Attributes:
        tables: the samples.
        etags: by split, of each container or, if that is a class folder, of each sample.
        warnings: about what was skipped.
    """

    tables: Tables
    etags: dict[str, Strings]
    warnings: tuple[str, ...]

    def identify(self, root: BucketPath) -> str:
        """Return a digest of the data set's URL and of every object that holds samples, by its ETag.

        The tables' own fingerprint has neither if they are stored beside the data, where a copy has the same.
        """
        digest = hashlib.sha256(
            f"{root}\0{self.tables.kind}\0{self.tables.fingerprint}".encode("utf-8", "surrogateescape")
        )
        for split in SPLITS:
            table: Table = getattr(self.tables, split)
            digest.update(json.dumps([split, table.paths, len(self.etags[split])]).encode())
            digest.update(self.etags[split].starts.tobytes() + self.etags[split].blob.tobytes())
        return digest.hexdigest()

    def format(self) -> bytes:
        """Return the index as bytes, to be sent to another process."""
        names = {split: [etags[i] for i in range(len(etags))] for split, etags in self.etags.items()}
        header = json.dumps({"etags": names, "warnings": self.warnings}).encode()
        return len(header).to_bytes(8, "little") + header + format_tables(self.tables)

    @classmethod
    def parse(cls, data: bytes) -> "BucketIndex":
        """Return the index that `format` made bytes of."""
        end = 8 + int.from_bytes(data[:8], "little")
        header, tables = json.loads(data[8:end]), parse_tables(data[end:])
        if tables is None:
            raise ValueError("an index that was damaged on its way from the main process")
        etags = {split: Strings.from_names(names) for split, names in header["etags"].items()}
        return cls(tables, etags, tuple(header["warnings"]))


def list_etags(listing: Listing, tables: Tables, packed: bool) -> dict[str, Strings]:
    """Return the ETags of a listed data set, by split: of each container or, where it is a folder, of each sample."""
    root = listing.root
    assert isinstance(root, BucketPath)
    if packed:
        return {
            split: Strings.from_names((root / path).stat().etag for path in listing.paths[split]) for split in SPLITS
        }
    etags = {}
    for split in SPLITS:
        table: Table = getattr(tables, split)
        names: list[str] = []
        at = 0
        for number, path in enumerate(table.paths):
            folder = "/".join(part for part in path.split("/") if part != ".")
            by_name = {info.key.rpartition("/")[2]: info.etag for info in (root / folder).list().objects}
            while at < len(table) and table.files[at] == number:
                names.append(by_name[table.names[at]])
                at += 1
        etags[split] = Strings.from_names(names)
    return etags
