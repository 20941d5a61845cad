"""Lock a folder in a bucket for one process, by an object that only its owner keeps changing.

There is no clock that all hosts share. So a lock does not hold a time: its owner writes it again every `BEAT_S`
seconds, with another number. Who wants the lock watches the object: if it changes, its owner lives; if it does not for
`LEASE_S` seconds of the watcher's own clock, the watcher replaces it with the next fencing token. `create` and `update`
have one winner, so that a lock has one owner. A former owner that was only stalled finds that its object was replaced.
It may still write until then; what counts must therefore be written by `update`, on an object that a new owner changes
first (see `podscale.training.checkpoint.bucket`).

An owner on the same machine that no longer runs need not be waited for.
"""

import json
import os
import socket
import threading
import time
from typing import Any

from podscale.errors import UserError
from podscale.storage.store import ObjectChangedError, Store, make_token

LOCK = "lock.json"
BEAT_S = 5.0  # between two signs of life of the owner
LEASE_S = 30.0  # without one, after which a lock is free
POLL_S = 0.5  # between two reads of another process's lock


class BucketLock:
    """Locks a store for one training, from `acquire` to the end of the `with` block or of the process.

    Attributes:
        fencing_token: how many owners there have been, with this one; 0 before `acquire`.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._token, self._beats, self._etag = store, make_token(), 0, ""
        self.fencing_token = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="podscale-lock", daemon=True)

    def acquire(self) -> None:
        """Lock the store, and start to show signs of life.

        Raises:
            UserError: another training has locked it; the message names its process.
            OSError: the store cannot be read or written.
        """
        while not self._try_acquire():
            pass
        self._thread.start()

    def _try_acquire(self) -> bool:
        """Return whether this process has the lock now; False: another one was faster, or the lock is gone."""
        try:
            etag, content = self._read()
        except FileNotFoundError:
            etag, content = "", {}
        if content.get("owner") and not _has_ended(content):
            self._wait_for_sign(etag, content)
        self.fencing_token = int(content.get("generation", 0)) + 1
        data = self._make_content()
        try:
            self._etag = self._store.update(LOCK, data, etag) if etag else self._store.create(LOCK, data)
        except (ObjectChangedError, FileExistsError):
            return False
        except FileNotFoundError:
            if not etag:
                raise  # there is no such bucket
            return False
        return True

    def _wait_for_sign(self, etag: str, content: dict[str, Any]) -> None:
        """Return once the owner has shown no sign of life for long enough.

        Raises:
            UserError: it has shown one.
        """
        deadline = time.monotonic() + LEASE_S
        while time.monotonic() < deadline:
            try:
                new_etag, new_content = self._read()
            except FileNotFoundError:
                return
            if new_etag != etag and new_content.get("owner"):
                raise UserError(
                    f"{self._store.location} is being trained by {content.get('process', 'another process')}; wait for "
                    "it, or choose another folder with --run"
                )
            if new_etag != etag:
                return
            time.sleep(POLL_S)

    def _read(self) -> tuple[str, dict[str, Any]]:
        info = self._store.stat(LOCK)
        try:
            content = json.loads(bytes(self._store.read(LOCK, info.etag)))
        except ObjectChangedError:
            return self._read()
        except ValueError:
            content = {}
        return info.etag, content if isinstance(content, dict) else {}

    def _make_content(self, *, released: bool = False) -> bytes:
        self._beats += 1
        content = {
            "generation": self.fencing_token,
            "owner": "" if released else self._token,
            "beat": f"{self._token} {self._beats}",
            "process": f"process {os.getpid()} on {socket.gethostname()}",
            "machine": _describe_machine(),
            "pid": os.getpid(),
            "started": _read_start(os.getpid()),
        }
        return json.dumps(content).encode()

    # --- in the thread ---

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_S):
            try:
                self._etag = self._store.update(LOCK, self._make_content(), self._etag)
            except (ObjectChangedError, FileNotFoundError):
                if not self._is_mine():
                    return  # it has another owner now, which the next commit notices
            except Exception:
                continue  # the store is away for a while, or has no valid credentials for us

    def _is_mine(self) -> bool:
        """Return whether nobody else has the lock, as far as can be read.

        A beat may have been written though its answer was lost. What cannot be read now is read at the next beat.
        """
        try:
            etag, content = self._read()
        except Exception:
            return True
        is_ours = content.get("owner") == self._token
        if is_ours or not content:  # not readable: the next beat replaces it
            self._etag = etag
        return is_ours or not content

    def __enter__(self) -> "BucketLock":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._thread.is_alive():
            return
        self._stopped.set()
        self._thread.join()
        try:
            self._store.update(LOCK, self._make_content(released=True), self._etag)
        except Exception:
            return  # it is free after a while


def _describe_machine() -> str:
    """Return what is the same for processes whose numbers mean the same: this boot, and this set of processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _read_start(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; empty if it does not run."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _has_ended(content: dict[str, Any]) -> bool:
    """Return whether the owner was a process of this machine that no longer runs."""
    machine, pid = _describe_machine(), content.get("pid")
    is_here = bool(machine) and content.get("machine") == machine and isinstance(pid, int)
    return is_here and _read_start(int(pid or 0)) != content.get("started")
