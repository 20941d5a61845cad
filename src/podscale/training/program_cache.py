"""The cache of compiled programs, which makes a run that starts again load its programs instead of compiling them.

JAX looks programs up by a digest of everything that they depend on. Here they are stored so that a process that is
killed, or a disk that is full, leaves no incomplete file. Between CPUs all processes of a pod have the same program:
one of them compiles it while the others wait, and load it. A compiled program is code: a user who can write to the
folder can run code as its owner. So the default folder belongs to the user alone.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from podscale.errors import UserError
from podscale.processes import private_jax
from podscale.storage.user_cache import get_user_cache, make_private_folder

MAX_BYTES = 4 << 30  # of the folder; the programs that were not used for longest are removed
SUFFIX = "-cache"  # as JAX's own
AUTOTUNE_FOLDER = "xla_gpu_per_fusion_autotune_cache_dir"  # where JAX makes XLA keep what it has tried on GPUs
CLAIM_SUFFIX = ".claim"
MIN_COMPILE_S = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"  # JAX's option
POLL_S = 0.02
MAX_WAIT_S = 600.0  # for a process that compiles, which may be stopped


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
        """Return a program; None if it is not there or cannot be read. May wait, inside of `share_compilation`."""
        if _is_bypassed.get():
            return None
        path, turn = self._path / f"{key}{SUFFIX}", _turn.get()
        program = _read_program(path)
        return turn.await_program(path) if turn and program is None else program

    def put(self, key: str, value: bytes) -> None:
        """Store a program, if the disk takes it. A file that is there is replaced: JAX could not use it."""
        if _is_bypassed.get():
            return
        path = self._path / f"{key}{SUFFIX}"
        part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            part.write_bytes(value)
            os.replace(part, path)
        except OSError:
            with suppress(OSError):
                part.unlink()

    def _remove_oldest(self, max_bytes: int) -> None:
        """Remove programs, and what XLA has tried, until both together take no more than `max_bytes`."""
        files = [*_list_files(self._path), *_list_files(self._path / AUTOTUNE_FOLDER)]
        excess = sum(size for _, size, _ in files) - max_bytes
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            os.unlink(path)
            excess -= size


def _list_files(folder: Path) -> list[tuple[float, int, str]]:
    """Return time of change, size and path of each file in a folder; none if there is no such folder."""
    if not folder.is_dir():
        return []
    entries = [entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    return [(entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in entries]


def _read_program(path: Path) -> bytes | None:
    try:
        program = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    return program


class _WaitEndedError(BaseException):
    """Carries the reason to wait no longer through JAX, which would go on and compile after an `Exception`."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


class _Turn:
    """Decides for one process which programs it compiles, and which it gets from the others.

    Who compiles holds a lock, which ends with its process.

    Args:
        check: called while this process waits; raises what ends the wait.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check, self._claims = check, dict[Path, int]()

    def await_program(self, path: Path) -> bytes | None:
        """Return the program that another process stores; None if this one has to compile it."""
        claim, deadline = path.with_name(f"{path.name}{CLAIM_SUFFIX}"), time.monotonic() + MAX_WAIT_S
        has_waited = False
        while time.monotonic() < deadline:
            try:
                is_ours = self._claim(claim)
            except OSError:  # no folder, or no locks: every process compiles
                return None
            program = _read_program(path)
            if program is not None or is_ours:
                if has_waited:  # the other process could not store it, perhaps for want of disk space: all compile now
                    self.end()
                return program
            try:
                self._check()
            except Exception as error:
                raise _WaitEndedError(error) from None
            has_waited = True
            time.sleep(POLL_S)
        return None

    def _claim(self, path: Path) -> bool:
        """Return whether this process now holds the lock; a file that its holder has removed does not count."""
        file, is_ours = os.open(path, os.O_RDWR | os.O_CREAT, 0o600), False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(file), path.stat())
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if is_ours:
                self._claims[path] = file
            else:
                os.close(file)
        return is_ours

    def end(self) -> None:
        """Let other processes compile what this one has not stored."""
        for path, file in self._claims.items():
            with suppress(OSError):
                path.unlink()
            os.close(file)
        self._claims.clear()


_turn: ContextVar[_Turn | None] = ContextVar("turn", default=None)
_is_bypassed: ContextVar[bool] = ContextVar("is_bypassed", default=False)


@contextmanager
def bypass_program_cache() -> Iterator[None]:
    """Compile everything inside of the block, in this thread: no program is looked up, and none is stored."""
    token = _is_bypassed.set(True)
    try:
        yield
    finally:
        _is_bypassed.reset(token)


@contextmanager
def share_compilation(check: Callable[[], None]) -> Iterator[None]:
    """Compile no program inside of the block, in this thread, that another process of this machine is compiling.

    Args:
        check: called while this process waits for the other one; raises what ends the wait.

    Raises:
        Exception: what `check` raises.
    """
    turn = _Turn(check)
    token = _turn.set(turn)
    try:
        yield
    except _WaitEndedError as ended:
        raise ended.reason from None
    finally:
        _turn.reset(token)
        turn.end()


def enable_program_cache(folder: str = "auto") -> str:
    """Make this process keep the programs that it compiles, for its next start and for others of the same user.

    Where the user has set JAX's own options, they hold: `JAX_COMPILATION_CACHE_DIR` for the folder, and
    `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS`, without which all programs are stored.

    Args:
        folder: "auto": in the user's cache folder; "none": no cache; else a folder.

    Returns:
        Why there is no cache, or not one for all processes; empty if there is one, or should be none.

    Raises:
        UserError: the folder has no name.

    Examples:
        >>> import podscale
        >>> podscale.enable_program_cache("none")
        ''
    """
    if not folder:
        raise UserError("name a folder for compiled programs, or auto, or none")
    missing = private_jax.replace_program_cache(ProgramCache)
    if folder == "none":
        return ""
    problem = (
        f"compiled programs are not shared by all processes: this version of JAX lacks {missing}" if missing else ""
    )
    if MIN_COMPILE_S not in os.environ:
        jax.config.update(MIN_COMPILE_S.lower(), 0.0)
    if jax.config.values["jax_compilation_cache_dir"]:
        return problem
    path = get_user_cache("programs") if folder == "auto" else Path(folder)
    try:
        make_private_folder(path)
    except OSError as error:
        return f"compiled programs are not cached: {error.strerror or error}"
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(path.absolute()))
    return problem
