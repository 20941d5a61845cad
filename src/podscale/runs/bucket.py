"""Runs in a bucket: the objects, and a working copy of the small files on this host.

    lock.json               who trains it; see `podscale.storage.bucket_lock`
    current.json            what counts: the fencing token of the owner, its files and their names, the checkpoints
    files-5/...             the run's files (recipe, journal, report, ...) as the fifth owner has written them
    checkpoints/34-1f3a-2/  the arrays and the manifest of a checkpoint; it exists if `current.json` names it

Training and all commands work on the copy, a folder like that of any run; checkpoints alone are read from and written
to the bucket directly. The files are sent before each checkpoint and at the end of a session, so that the journal
reaches at least as far as the checkpoint. No process needs to see another one's disk.

A listing may lag behind what was written. So `current.json` names the files, and listings only add to them: those
of other processes, and what is to be deleted.

`current.json` is the one object that commits. A new owner of the lock changes it first; every later change is made by
its ETag and carries the owner's fencing token. So a former owner that stalled and wakes up can commit nothing, and
what else it writes has names that nobody looks at.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from podscale.errors import UserError
from podscale.storage.bucket_lock import LOCK, BucketLock
from podscale.storage.locations import Location, has_scheme, parse_location
from podscale.storage.lock import FolderLock
from podscale.storage.open import open_store
from podscale.storage.store import ObjectChangedError

CURRENT = "current.json"
FILES = "files-"
CHECKPOINTS = "checkpoints"
NOT_SENT = (".part", ".lock")
Current = dict[str, Any]


class RunTakenOverError(UserError):
    """Another training has taken over the run: this one was not heard of for too long."""


class RunBucket:
    """A run in a bucket, and the folder of its working copy.

    Args:
        location: of the run.
        folder: of the copy; empty at first.
    """

    def __init__(self, location: Location, folder: Path) -> None:
        self.location, self.folder, self.store = location, folder, open_store(location, "--run")
        self._fencing_token, self._etag = 0, ""
        self.current: Current = {}
        self._sent = dict[str, tuple[int, int]]()  # time and size of every file that was sent

    def refresh(self) -> Current:
        """Read what counts now; empty for a run that does not exist yet."""
        try:
            etag = self.store.stat(CURRENT).etag
            self.current, self._etag = json.loads(bytes(self.store.read(CURRENT, etag))), etag
        except FileNotFoundError:
            self._check_empty()
            self.current, self._etag = {}, ""
        except ObjectChangedError:
            return self.refresh()
        except ValueError:
            raise UserError(f"{self.location}/{CURRENT} is not valid JSON; choose another folder with --run") from None
        return self.current

    def _check_empty(self) -> None:
        """Refuse a location with objects that are no run's, some of which might be deleted as left over.

        Raises:
            UserError: there are some.
            OSError: there is no bucket either.
        """
        listing = self.store.list_folder()
        names = [*listing.folders, *(info.key for info in listing.objects)]
        foreign = [name for name in names if name != LOCK and not name.removeprefix(FILES).isdecimal()]
        if foreign:
            raise UserError(
                f"{self.location} is not empty and holds no run (it has {foreign[0]}); choose another folder with --run"
            )

    def pull(self) -> None:
        """Replace the working copy by the files that count now."""
        prefix = self.refresh().get("files", "")
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self._sent = {}
        for key in self._list_files(self.current) if prefix else ():
            path = self.folder / key.removeprefix(f"{prefix}/")
            if not path.resolve().is_relative_to(self.folder.resolve()):
                continue
            with suppress(FileNotFoundError):  # it was removed since, or never came to be
                data = self.store.read(key)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def _list_files(self, current: Current) -> list[str]:
        """Return the keys of an owner's files: those that it has named, and those that are listed."""
        prefix = current["files"]
        named = {f"{prefix}/{name}" for name in current.get("names", ())}
        return sorted(named | {info.key for info in self.store.list(prefix)})

    def take_over(self, fencing_token: int) -> None:
        """Make the owner of the lock with this fencing token the only one that can commit.

        The tokens of a lock that was deleted begin again; names that a former owner may still write are not used again.
        """
        self.pull()
        old = self.current
        self._fencing_token = fencing_token = max(fencing_token, int(old.get("generation", 0)) + 1)
        owned: Current = {"generation": fencing_token, "files": f"{FILES}{fencing_token}"}
        self.current = {"steps": {}, "aside": {}, "last": None, **old, **owned}
        self._send("*")
        self._write()
        self._delete_old_files(old)

    def _delete_old_files(self, old: Current) -> None:
        """Delete the files of former owners, also of those that were killed before they could."""
        keys = set(self._list_files(old)) if old else set()
        for name in self.store.list_folder().folders:
            number = name.removeprefix(FILES)
            if name.startswith(FILES) and number.isdecimal() and int(number) < self._fencing_token:
                keys |= {info.key for info in self.store.list(name)}
        for key in keys:
            if not key.startswith(f"{self.current['files']}/"):
                self.store.delete(key)

    def push(self, pattern: str = "*") -> None:
        """Send the files of the working copy that have changed and whose names match a pattern.

        Raises:
            RunTakenOverError: another process has become the owner, which is noticed if there are new files.
            OSError: the bucket cannot be written.
        """
        self._send(pattern)
        if self._fencing_token and set(self._sent) != set(self.current["names"]):
            self._write()

    def _send(self, pattern: str) -> None:
        prefix = self.current.get("files", "")
        for path in sorted(self.folder.rglob(pattern)):
            name = path.relative_to(self.folder).as_posix()
            if not path.is_file() or path.suffix in NOT_SENT or name in ("lock", LOCK):
                continue
            try:
                status = path.stat()
                stamp = (status.st_mtime_ns, status.st_size)
                if self._sent.get(name) != stamp:
                    self.store.write_file(f"{prefix}/{name}", path)
                    self._sent[name] = stamp
            except FileNotFoundError:
                if path.exists():
                    raise

    def commit(self, change: Callable[[Current], None]) -> None:
        """Change what counts.

        Raises:
            RunTakenOverError: another process has become the owner.
        """
        before = json.dumps(self.current)
        change(self.current)
        try:
            self._write()
        except BaseException:
            self.current = json.loads(before)
            raise

    def _write(self) -> None:
        self.current["names"] = sorted(self._sent)
        data = json.dumps(self.current, indent=1).encode()
        try:
            self._etag = (
                self.store.update(CURRENT, data, self._etag) if self._etag else self.store.create(CURRENT, data)
            )
        except (ObjectChangedError, FileExistsError):
            raise RunTakenOverError(
                f"{self.location} has been taken over by another process, since this one was not heard of for too long"
            ) from None

    def delete_checkpoint(self, key: str) -> None:
        """Delete the objects of a checkpoint that no longer counts."""
        self._delete_below(f"{CHECKPOINTS}/{key}")

    def delete_leftovers(self) -> None:
        """Delete the objects of checkpoints that never counted."""
        known = {entry["key"] for entry in self.current.get("steps", {}).values()}
        known |= set(self.current.get("aside", {}).values())
        for name in self.store.list_folder(CHECKPOINTS).folders:
            if name not in known:
                self.delete_checkpoint(name)

    def _delete_below(self, prefix: str) -> None:
        for info in list(self.store.list(prefix)):
            self.store.delete(info.key)


class BucketRunLock:
    """Locks a run in a bucket and takes it over; a context manager, as `FolderLock` is."""

    def __init__(self, bucket: RunBucket) -> None:
        self._bucket, self._lock = bucket, BucketLock(bucket.store)

    def acquire(self) -> None:
        """Lock the run, and bring the working copy up to date.

        Raises:
            UserError: another training has locked it.
        """
        self._lock.acquire()
        self._bucket.take_over(self._lock.fencing_token)

    def check(self) -> None:
        """Nothing to do: what is committed says whose the run is."""

    def __enter__(self) -> "BucketRunLock":
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        """Send the last changes, and release the lock."""
        try:
            self._bucket.push("*" if self._lock.fencing_token else "bad-images-*.txt")
        except RunTakenOverError:
            if kind is None:
                raise
        except OSError as problem:
            if kind is None:
                raise UserError(f"cannot write to {self._bucket.location}: {problem.strerror or problem}") from None
        finally:
            self._lock.__exit__(kind, *error)


_buckets = dict[Path, RunBucket]()  # by the folder of the working copy; one for each run that this process has opened


def resolve_folder(folder: str | os.PathLike[str], option: str = "--run") -> Path:
    """Return a run's folder: a path as it is; for a URL that of a working copy, made or brought up to date.

    Args:
        folder: a path, or a URL such as s3://bucket/runs/one.
        option: the option that it was given with, for the message.

    Raises:
        UserError: the URL is not supported, or cannot be read.

    >>> resolve_folder("runs/digits")
    PosixPath('runs/digits')
    """
    if not has_scheme(folder):
        return Path(folder).expanduser()
    location = parse_location(folder, option)
    try:
        return _open_copy(location)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or location}: {error.strerror or error}") from None


def _open_copy(location: Location) -> Path:
    """Return the folder of a run's working copy, which this process alone uses and removes when it ends."""
    for folder, bucket in _buckets.items():
        if bucket.location == location:
            bucket.pull()
            return folder
    place = Path(tempfile.mkdtemp(prefix="podscale-run-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    folder = place / (os.path.basename(location.key) or location.bucket)
    folder.mkdir()
    bucket = RunBucket(location, folder)
    bucket.pull()
    _buckets[folder] = bucket
    return folder


def open_lock(folder: Path) -> "FolderLock | BucketRunLock":
    """Return the lock of a run's folder, or of the bucket that it is a working copy of."""
    bucket = find_bucket(folder)
    return BucketRunLock(bucket) if bucket else FolderLock(folder)


def find_bucket(folder: Path) -> RunBucket | None:
    """Return the bucket that a folder is a working copy of; None for an ordinary folder."""
    return _buckets.get(folder)
