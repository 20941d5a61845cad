"""Write metrics.jsonl, one line per event."""

import json
from pathlib import Path
from typing import IO, Any

from podscale.storage.files import read_lines, to_json, write_atomically


class Journal:
    """metrics.jsonl: one line an event.

    A resumed run goes on at its step: lines past it are dropped. Lines that a full disk has no room for are written as
    soon as there is some.
    """

    def __init__(self, folder: Path, start: int) -> None:
        path = folder / "metrics.jsonl"
        kept = [line for line in read_lines(path) if json.loads(line)["step"] <= start] if start else []
        text = "".join(f"{line}\n" for line in kept)
        if not path.exists() or path.read_text() != text:  # a full disk has no room to write the same again
            write_atomically(path, text)
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._unwritten = b""

    def write(self, event: str, step: int, **values: Any) -> None:
        """One line; an OSError if the disk did not take it yet."""
        self._unwritten += (to_json({"event": event, "step": step, **values}) + "\n").encode()
        self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        try:
            self._file.write(self._unwritten)
        finally:
            self._file.close()
