"""Suggest valid values near an invalid one, for the end of an error message."""

import difflib
import math
from collections.abc import Iterable


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return the hint that ends a message about an unknown name.

    >>> suggest_names("resnet51", ["resnet50", "resnet101"])
    'did you mean resnet50 or resnet101?'
    >>> suggest_names("zzz", ["b", "a"])
    'known: a, b'
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=2)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(known))}"


def list_divisors(whole: int) -> list[int]:
    """Return the numbers that divide `whole`, from 1 up.

    >>> list_divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0]
    return sorted({*small, *(whole // d for d in small)})


def suggest_numbers(value: int, valid: Iterable[int]) -> str:
    """Return the hint that ends a message about a number: the valid ones on either side of it.

    >>> suggest_numbers(96, [16, 32, 64, 128, 256])
    'nearest that do: 64, 128'
    """
    valid = sorted(set(valid))
    around = [v for v in valid if v < value][-1:] + [v for v in valid if v > value][:1]
    return f"nearest that do: {', '.join(map(str, around))}" if around else "nothing does"
