"""Write files atomically, and read back what a killed process may have left incomplete."""

import json
import math
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is either all there or not there at all, whoever else writes it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def to_json(values: Any, indent: int | None = None) -> str:
    """JSON as the standard has it: a number that is none, such as a diverged loss, is null.

    >>> to_json({"loss": float("nan"), "step": 1})
    '{"loss": null, "step": 1}'
    """
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """What a JSON file holds; None if there is none, or it is broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def read_lines(path: Path) -> list[str]:
    """The lines of a file that may not exist, without the half line that a killed process may have left at its end."""
    return [line for line in path.read_text().split("\n")[:-1] if line] if path.exists() else []
