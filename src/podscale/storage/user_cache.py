"""The user's cache folder, and folders in it that nobody else can write to."""

import os
import stat
import tempfile
from pathlib import Path


def get_user_cache(name: str) -> Path:
    """Return the folder of one of Podscale's caches, in $XDG_CACHE_HOME or else ~/.cache; it need not exist.

    A user without a home, as in some containers, has one in the folder for temporary files.

    Args:
        name: of the cache, such as "index".
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        base = os.path.join(tempfile.gettempdir(), f"podscale-{os.geteuid()}")
    return Path(base) / "podscale" / name


def make_private_folder(folder: Path, *, check_parents: bool = True) -> None:
    """Create a folder that only its owner can use, and check that nobody else can write to it or replace it.

    Args:
        folder: path of the folder.
        check_parents: whether what is in it can be harmful, as programs can: nobody else may be able to replace it by
            a folder from before. A volume that Kubernetes mounts (`emptyDir`) can be written by everybody.

    Raises:
        OSError: it cannot be created, or someone else can write to it or, if that is checked, to a folder above it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    resolved = folder.resolve()
    for path in (resolved, *(resolved.parents if check_parents else ())):
        status = path.stat()
        can_others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()) or can_others_write:
            raise PermissionError(f"other users can write to {path}")
