"""Define documented dataclass fields, and set them from TOML values or text with checks.

Recipes and options are frozen dataclasses that users fill in from files and from the command line. Both go through the
functions here, so the same mistake gets the same message wherever it is made.
"""

import dataclasses
import tomllib
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from podscale.config.registry import Registry
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError

T = TypeVar("T")
MAX_TEXT = 1000  # characters of a number, or of true or false


def document_field(default: Any, doc: str) -> Any:
    """Return a dataclass field with a default and the line that `--help` shows for it."""
    return dataclasses.field(default=default, metadata={"doc": doc})


def replace_fields(section: T, name: str, values: Mapping[str, object]) -> T:
    """Return a copy of a dataclass with some fields set.

    Args:
        section: the dataclass.
        name: what messages call it.
        values: new values by field; text is read as TOML.

    Raises:
        UserError: there is no such field, or a value has the wrong type.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Oven:
    ...     heat: float = 180.0
    >>> replace_fields(Oven(), "oven", {"heat": "200"})
    Oven(heat=200.0)
    """
    kinds = typing.get_type_hints(type(section))
    for field in values:
        if field not in kinds:
            raise UserError(f"section {name} has no field {field!r}: {suggest_names(field, kinds)}")
    new = {field: coerce(f"{name}.{field}", value, kinds[field]) for field, value in values.items()}
    return dataclasses.replace(section, **new)  # type: ignore[type-var]


ADDED_CHOICES: Registry[tuple[str, ...]] = Registry("field")  # choices that programs have added, by "section.field"


def add_choice(where: str, name: str) -> None:
    """Allow another name for a field that takes one of a few.

    Args:
        where: "section.field".
        name: the new choice.
    """
    choices = (*list_added_choices(where), name)
    ADDED_CHOICES.remove(where)
    ADDED_CHOICES.add(where, choices)


def list_added_choices(where: str) -> tuple[str, ...]:
    """Return the choices that programs have added to a field, "section.field"."""
    if where not in ADDED_CHOICES:
        return ()
    return ADDED_CHOICES[where]


def coerce(where: str, value: Any, kind: Any) -> Any:
    """Return `value` converted to `kind`.

    Args:
        where: "section.field", for messages.
        value: a TOML value, or text.
        kind: the field's type.

    Raises:
        UserError: the value does not fit.
    """
    if isinstance(value, str) and kind is not str and typing.get_origin(kind) is not Literal:
        value = _parse_text(where, value, kind)
    origin = typing.get_origin(kind)
    if origin is Literal:
        choices = [*typing.get_args(kind), *list_added_choices(where)]
        if value not in choices:
            raise UserError(f"{where} cannot be {_format_value(value)}: choose {', '.join(map(str, choices))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} must be a list, not {_format_value(value)}")
        return tuple(coerce(where, v, typing.get_args(kind)[0]) for v in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UserError(f"{where} is too large for a number") from None
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise UserError(f"{where} must be {_describe_kind(kind)}, not {_format_value(value)}")
    if kind is str and any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(f"{where} {value!a} is not text in UTF-8; rename what it names")
    if kind is int and abs(value) >= 2**63:
        raise UserError(f"{where} is too large for a number")
    return value


def check_type(where: str, value: object, kind: Any) -> None:
    """Refuse a value that is not of a field's type; other than by `coerce`, nothing is converted, and text is not read.

    Args:
        where: "section.field", for messages.
        value: what a program has set.
        kind: the field's type.

    Raises:
        UserError: the value does not fit, or is not a number at all (NaN).

    >>> check_type("plan.micro_batches", "2", int)
    Traceback (most recent call last):
    podscale.errors.UserError: plan.micro_batches must be a whole number, not '2'
    """
    if coerce(where, value, kind) != value:
        raise UserError(f"{where} must be {_describe_kind(kind)}, not {_format_value(value)}")


def _parse_text(where: str, text: str, kind: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        parts = [part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",")]
        return [part.strip("'\"") for part in parts if part]
    try:
        if len(text) > MAX_TEXT:
            raise ValueError("longer than any number")
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # ValueError: not TOML, or more digits than Python reads
        text = text if len(text) <= 40 else text[:40] + "..."
        raise UserError(f"{where} must be {_describe_kind(kind)}, not {text!r}") from None


def _format_value(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python does not print the longest numbers
        return "a number of so many digits"


def _describe_kind(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
