"""Write metrics.jsonl, one line per event."""

import json
from pathlib import Path
from typing import IO

from podscale.config.json_types import Json
from podscale.storage.files import read_lines, to_json, write_atomically


class Journal:
    """Writes metrics.jsonl: one line per event.

    A resumed run continues at its step: lines past it are dropped. Lines for which the disk has no space are written as
    soon as there is some.

    Args:
        folder: the run's.
        start: the step that the run resumes from; 0: it starts from scratch.
    """

    def __init__(self, folder: Path, start: int) -> None:
        path = folder / "metrics.jsonl"
        lines = [line for line in read_lines(path) if json.loads(line)["step"] <= start] if start else []
        text = "".join(f"{line}\n" for line in lines)
        if not path.exists() or path.read_bytes() != text.encode(
            errors="surrogateescape"
        ):  # a full disk has no space to write the same again
            write_atomically(path, text)
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._unwritten = b""

    def write(self, event: str, step: int, **values: Json) -> None:
        """Write one line.

        Raises:
            OSError: the disk did not take it yet; it is kept for the next call.
        """
        self._unwritten += (to_json({"event": event, "step": step, **values}) + "\n").encode()
        self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        """Write the remaining lines, and close the file."""
        try:
            self._file.write(self._unwritten)
        finally:
            self._file.close()
