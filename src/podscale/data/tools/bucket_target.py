"""Prepare a data set into a bucket: in a folder of the user's cache first, then object by object.

The journal, which says that the data set is incomplete, is written first, and the one that says that it is complete
last: until then no command takes the bucket's folder for a data set. The same command resumes after a failure.
"""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from podscale.config.json_types import JsonObject
from podscale.data.files import Progress
from podscale.data.index.bucket_index import JOURNAL_FILE
from podscale.data.tools.prepare import prepare_data_set
from podscale.data.tools.target import Settings
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
    store = open_store(location)
    folder = get_user_cache("prepare") / hashlib.sha256(str(location).encode()).hexdigest()[:32]
    try:
        _check_target(store, settings)
        result = prepare_data_set(source, folder, settings, kind, progress=progress, max_image_mib=max_image_mib)
        _upload(store, folder, progress)
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
    shutil.rmtree(folder)
    return result | {"prepared": str(location)}


def _check_target(store: Store, settings: Settings) -> None:
    """Refuse a folder that holds anything but what the same settings have prepared."""
    listing = store.list_folder()
    names = {*listing.folders, *(info.key for info in listing.objects)}
    if not names:
        return
    if JOURNAL_FILE not in names:
        raise UserError(f"{store.location} is not empty and holds nothing that was prepared; name another folder")
    try:
        before = json.loads(store.read(JOURNAL_FILE).tobytes())["settings"]
    except (ValueError, KeyError, TypeError):
        before = None
    if before != asdict(settings):
        raise UserError(f"{store.location} was started with other settings; repeat those or name another folder")


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
