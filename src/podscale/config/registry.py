"""Registries: parts by name, to which programs may add their own.

A registry is the only state that a module of this package holds.
"""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Parts of one kind by name, in the order in which they were added.

    Args:
        kind: what messages call a part, such as "optimizer".
        parts: those that are built in.

    >>> ovens = Registry("oven", {"gas": 250})
    >>> ovens.add("wood", 400)
    >>> list(ovens), ovens["wood"]
    (['gas', 'wood'], 400)
    >>> ovens["woods"]
    Traceback (most recent call last):
    podscale.errors.UserError: there is no oven 'woods': did you mean wood?
    """

    def __init__(self, kind: str, parts: Mapping[str, T] | None = None) -> None:
        self.kind, self._parts = kind, dict(parts or {})

    def add(self, name: str, part: T) -> None:
        """Add a part.

        Raises:
            UserError: there is already one of this name.
        """
        if name in self._parts:
            raise UserError(f"there is already a part {name!r} of kind {self.kind}; choose another name")
        self._parts[name] = part

    def remove(self, name: str) -> None:
        """Forget a part; nothing happens if there is none of this name."""
        self._parts.pop(name, None)

    def __getitem__(self, name: str) -> T:
        """Return a part.

        Raises:
            UserError: there is none of this name; the message has the nearest names.
        """
        if name not in self._parts:
            raise UserError(f"there is no {self.kind} {name!r}: {suggest_names(name, self._parts)}")
        return self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
