"""The cache of compiled programs, which makes a run that starts again load its programs instead of compiling them.

JAX looks programs up by a digest of everything that they depend on. Here they are stored so that a process that is
killed, or a disk that is full, leaves no incomplete file, and each process of a run stores its own. A compiled program
is code: a user who can write to the folder can run code as its owner. So the default folder belongs to the user alone.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from podscale.processes import private_jax
from podscale.storage.user_cache import get_user_cache, make_private_folder

MAX_BYTES = 4 << 30  # of the folder; the programs that were not used for longest are removed
SUFFIX = "-cache"  # as JAX's own


class ProgramCache:
    """Compiled programs in a folder, one file each.

    >>> import tempfile
    >>> cache = ProgramCache(tempfile.mkdtemp())
    >>> cache.put("jit_f-12ab", b"program")
    >>> cache.get("jit_f-12ab"), cache.get("jit_g-34cd")
    (b'program', None)
    """

    def __init__(self, folder: str | Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = Path(folder)
        with suppress(OSError):  # without a folder, every program is compiled
            self._path.mkdir(parents=True, exist_ok=True)
            self._remove_oldest(max_bytes)

    def get(self, key: str) -> bytes | None:
        """Return a program; None if it is not there or cannot be read."""
        path = self._path / f"{key}{SUFFIX}"
        try:
            program = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return program

    def put(self, key: str, value: bytes) -> None:
        """Store a program, if the disk takes it. A file that is there is replaced: JAX could not use it."""
        path = self._path / f"{key}{SUFFIX}"
        part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            part.write_bytes(value)
            os.replace(part, path)
        except OSError:
            with suppress(OSError):
                part.unlink()

    def _remove_oldest(self, max_bytes: int) -> None:
        files = [(entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(self._path)]
        excess = sum(size for _, size, _ in files) - max_bytes
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            if not os.path.isdir(path):
                os.unlink(path)
                excess -= size


def enable_program_cache(folder: str = "auto") -> str:
    """Make this process keep the programs that it compiles, for its next start and for others of the same user.

    Where the user has set JAX's own option (`JAX_COMPILATION_CACHE_DIR`), its folder is used.

    Args:
        folder: "auto": in the user's cache folder; "none": no cache; else a folder.

    Returns:
        Why there is no cache; empty if there is one, or should be none.
    """
    private_jax.replace_program_cache(ProgramCache)
    if jax.config.values["jax_compilation_cache_dir"] or folder == "none":
        return ""
    path = get_user_cache("programs") if folder == "auto" else Path(folder)
    try:
        make_private_folder(path)
    except OSError as error:
        return f"compiled programs are not cached: {error.strerror or error}"
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(path.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return ""
