"""The lock of a run's folder."""

import errno
import fcntl
import os
import shutil

import pytest

from podscale.errors import UserError
from podscale.storage.lock import FolderLock, FolderReplacedError


def test_a_second_training_is_refused_until_the_first_has_ended(tmp_path):
    first, second = FolderLock(tmp_path / "run"), FolderLock(tmp_path / "run")
    with first:
        first.acquire()
        with pytest.raises(UserError, match=f"is being trained by process {os.getpid()} on "):
            second.acquire()
    with second:
        second.acquire()
        with pytest.raises(UserError, match="is being trained by"):
            first.acquire()


def test_a_folder_in_which_another_training_has_started_is_no_longer_ours(tmp_path):
    """Its own one was moved away, or deleted: the lock is that of a file, not of a path."""
    with FolderLock(tmp_path / "run") as first, FolderLock(tmp_path / "run") as second:
        first.check()  # has not locked anything
        first.acquire()
        first.check()
        (tmp_path / "run").rename(tmp_path / "moved")
        first.check()  # it is just gone
        (tmp_path / "run").symlink_to(tmp_path / "moved")
        first.check()
        (tmp_path / "run").unlink()
        shutil.copytree(tmp_path / "moved", tmp_path / "run")
        first.check()  # a copy, in which nobody trains
        second.acquire()
        second.check()
        with pytest.raises(FolderReplacedError, match="was moved or deleted during this training, and is now trained"):
            first.check()
    with FolderLock(tmp_path / "moved") as lock:
        lock.acquire()
        (tmp_path / "moved" / "lock").rename(tmp_path / "old lock")
        (tmp_path / "moved" / "lock").write_text("process 7 on another host")  # which has ended
        with pytest.raises(FolderReplacedError, match="is now trained by process 7 on another host"):
            lock.check()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_taken_for_a_second_training(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=f"cannot be locked .*: {os.strerror(code)}; mount its file system"):
        FolderLock(tmp_path / "run").acquire()
