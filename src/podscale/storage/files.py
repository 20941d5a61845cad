"""Write files atomically, and read files that a killed process may have left incomplete."""

import json
import math
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or none of it, even if several processes write it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def to_json(values: Any, indent: int | None = None) -> str:
    """Return standard JSON; a non-finite number, such as a diverged loss, becomes null.

    >>> to_json({"loss": float("nan"), "step": 1})
    '{"loss": null, "step": 1}'
    """
    return json.dumps(_replace_nonfinite(values), indent=indent, allow_nan=False)


def _replace_nonfinite(value: Any) -> Any:
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
    return [line for line in path.read_text().split("\n")[:-1] if line] if path.exists() else []
