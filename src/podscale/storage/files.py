"""Write files atomically, and read files that a killed process may have left incomplete, or that may be no files."""

import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file to read its bytes. A pipe, socket or device is refused instead of being waited for.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: str | os.PathLike[str]) -> int:
    """Return a descriptor to read a regular file with; see `open_regular`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, f"it is {describe_kind(mode)}, not a regular file", os.fspath(path))


def describe_kind(mode: int) -> str:
    """Return what a file is, by the mode that `os.stat` reports.

    >>> describe_kind(stat.S_IFIFO)
    'a named pipe'
    """
    names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return names.get(stat.S_IFMT(mode), "a device")


def read_text(path: str | os.PathLike[str], max_bytes: int) -> str:
    """Return the text of a regular file in UTF-8.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `max_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()


def write_atomically(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file so that readers see all of it or none of it, even if several processes write it.

    Names of files that are not UTF-8 are written as the bytes that they are.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with name_file(path):
            part.write_text(text, encoding="utf-8", errors="surrogateescape")
            if durable:
                flush(part)
            os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_durably(path: Path, text: str) -> None:
    """Write a file as `write_atomically` does; it is on disk when this returns, whatever happens to the machine."""
    write_atomically(path, text, durable=True)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Name a file in the errors of a block that names none: on a full disk, writing to an open file does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # without a code, Python would print neither
            error.filename = str(path)
        raise


def to_json(values: object, indent: int | None = None) -> str:
    """Return standard JSON; a non-finite number, such as a diverged loss, becomes null.

    >>> to_json({"loss": float("nan"), "step": 1})
    '{"loss": null, "step": 1}'
    """
    return json.dumps(_replace_nonfinite(values), indent=indent, allow_nan=False)


def _replace_nonfinite(value: object) -> object:
    if isinstance(value, dict):
        return {k: _replace_nonfinite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if the file is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def read_lines(path: Path) -> list[str]:
    """Return a file's lines without the incomplete one that a killed process may have left; none if it is missing."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")[:-1] if line]
