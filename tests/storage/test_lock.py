"""The lock of a run's folder."""

import errno
import fcntl
import os

import pytest

from podscale.errors import UserError
from podscale.storage.lock import FolderLock


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


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_taken_for_a_second_training(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=f"cannot be locked .*: {os.strerror(code)}; mount its file system"):
        FolderLock(tmp_path / "run").acquire()
