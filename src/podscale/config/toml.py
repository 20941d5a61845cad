"""Parse TOML that users wrote, in bounded time: the parser needs time that grows with the square of a key's parts."""

import json
import tomllib

from podscale.config.json_types import JsonObject
from podscale.errors import UserError

MAX_TOML_BYTES = 2**19
MAX_DOTS = 200  # in a line, and so in a key


def parse_toml(text: str, title: str) -> JsonObject:
    """Return the tables of a TOML text.

    Args:
        text: the text.
        title: what messages call it.

    Raises:
        UserError: it is not TOML, or is larger than any file that a person writes.

    >>> parse_toml("[batch]\\nsize = 128", "recipe mine")
    {'batch': {'size': 128}}
    """
    if len(text) > MAX_TOML_BYTES:
        raise UserError(f"{title} has {len(text):,} characters; at most {MAX_TOML_BYTES:,} are allowed")
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > MAX_DOTS:
            raise UserError(f"{title} has {line.count('.'):,} dots in line {number}; a line may have {MAX_DOTS}")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{title} is not valid TOML: {error}") from None


def format_toml(value: object) -> str:
    """Return a plain value as TOML.

    >>> format_toml([1, "a"])
    '[1, "a"]'
    """
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # the one character that JSON allows and TOML does not
