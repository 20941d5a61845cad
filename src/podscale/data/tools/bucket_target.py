"""Prepare a data set into a bucket: in a folder of the user's cache first, then object by object.

The journal, which says that the data set is incomplete, is written first, and the one that says that it is complete
last: until then no command takes the bucket's folder for a data set. The same command resumes after a failure; a folder
that was prepared from other data or with other settings is left as it is.
"""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

from podscale.config.json_types import JsonObject
from podscale.data.files import Progress
from podscale.data.index import catalog
from podscale.data.index.bucket_index import INDEX_FILE, JOURNAL_FILE, open_folder
from podscale.data.index.containers.container import CLASSES_FILE
from podscale.data.index.table import SPLITS
from podscale.data.tools.prepare import open_source, prepare_source, summarize
from podscale.data.tools.target import Settings, Target
from podscale.errors import UserError
from podscale.storage.locations import parse_location
from podscale.storage.open import open_store
from podscale.storage.store import Store
from podscale.storage.user_cache import get_user_cache


def prepare_into_bucket(
    source: str,
    target: str,
    settings: Settings,
    kind: str = "",
    *,
    progress: Progress | None = None,
    max_image_mib: int,
) -> JsonObject:
    """Prepare a data set into a folder of a bucket; see `prepare_data_set`. Local disk must hold all of it for a while.

    Raises:
        UserError: as there; or the bucket cannot be written, or its folder holds something else.
    """
    location = parse_location(target, "DST")
    if not location.is_writable:
        raise UserError(f"DST {target}: a web server is only read from; use s3://, gs:// or az://")
    store, start = open_store(location), time.monotonic()
    source_folder = open_folder(os.fspath(source), "the data set")
    kind = catalog.detect_kind(source_folder, kind)
    folder = get_user_cache("prepare") / hashlib.sha256(str(location).encode()).hexdigest()[:32]
    try:
        before = _open_target(store, settings)
        opened = open_source(source_folder, kind, settings, progress, max_image_mib)
        if before is not None:
            before.check_source(opened.digest, str(location))
        if before is not None and _is_complete(before, store):
            result = summarize(opened, before) | {"already": True}
        else:
            result = prepare_source(opened, folder, settings, progress=progress) | {"already": False}
            _upload(store, folder, progress)
            shutil.rmtree(folder)
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
    return result | {"prepared": str(location), "seconds": time.monotonic() - start}


def _open_target(store: Store, settings: Settings) -> Target | None:
    """Return what the journal of an earlier prepare says; None in an empty folder. Refuse any other folder."""
    listing = store.list_folder()
    names = {*listing.folders, *(info.key for info in listing.objects)}
    if not names:
        return None
    if JOURNAL_FILE not in names:
        raise UserError(f"{store.location} is not empty and holds nothing that was prepared; name another folder")
    try:
        target = Target.parse(Path(), store.read(JOURNAL_FILE).tobytes().decode())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UserError):
        raise UserError(
            f"{store.location.join(JOURNAL_FILE)} is damaged; delete that folder of the bucket and prepare it again"
        ) from None
    target.check_settings(settings, str(store.location))
    return target


def _is_complete(target: Target, store: Store) -> bool:
    """Return whether a journal says that the data set is finished, and all its objects are there."""
    sizes = {info.key: info.size for info in store.list_folder().objects}
    shards = [shard for split in SPLITS for shard in target.finished_shards[split]]
    return (
        target.finished
        and all(sizes.get(shard["name"]) == shard["bytes"] for shard in shards)
        and {CLASSES_FILE, INDEX_FILE} <= sizes.keys()
    )


def _upload(store: Store, folder: Path, progress: Progress | None) -> None:
    journal = json.loads((folder / JOURNAL_FILE).read_text(encoding="utf-8"))
    store.write(JOURNAL_FILE, json.dumps(journal | {"finished": False}).encode())
    paths = sorted(path for path in folder.iterdir() if path.name != JOURNAL_FILE)
    for number, path in enumerate(paths, 1):
        store.write_file(path.name, path)
        if progress is not None:
            progress("uploading files", number, len(paths))
    names = {path.name for path in paths} | {JOURNAL_FILE}
    for info in store.list_folder().objects:
        if info.key not in names:  # of an earlier attempt, from other data
            store.delete(info.key)
    store.write_file(JOURNAL_FILE, folder / JOURNAL_FILE)
