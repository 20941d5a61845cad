"""The one exception that means: the user asked for something that cannot be. Two others mean the end of a run.

Every part raises the first with a single sentence that says what is wrong, where, and what to do.
The command line prints that sentence and exits with code 2; in Python it is an ordinary exception.
Anything else that escapes is our own mistake and keeps its traceback.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """What the user asked for cannot be done; the message is one sentence."""


class PreemptedError(Exception):
    """A run was asked to stop, and has saved what it knew."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped as asked after step {step:,}, which is saved; the same command goes on from there")
        self.step = step


class DivergedError(Exception):
    """A run has no number to learn from any more, and going back did not help."""


# What XLA says of a device's memory. A kernel's own memory and a disk run out under the same name, and are not meant.
FULL = re.compile(
    r"RESOURCE_EXHAUSTED: .*([Oo]ut of memory(?! in memory space [sv]mem)|allocating device buffer)", re.S
)


@contextmanager
def memory_told() -> Iterator[None]:
    """What JAX raises where a device's memory is full becomes a sentence."""
    try:
        yield
    except RuntimeError as error:  # jax.errors.JaxRuntimeError is one; this module does without JAX
        words = str(error)
        if not FULL.match(words):
            raise
        wanted = re.search(r"allocat\w+ ([\d.]+ ?\w+)", words)
        raise UserError(
            f"a device's memory is full{f' ({wanted[1]} more were wanted)' if wanted else ''}: with a higher "
            "--plan.micro_batches training needs less and learns the same; other programs may be on the device, too"
        ) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint that ends a sentence about an unknown name.

    >>> nearest("resnet51", ["resnet50", "resnet101"])
    'did you mean resnet50 or resnet101?'
    >>> nearest("zzz", ["b", "a"])
    'known: a, b'
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=2)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(known))}"


def divisors(whole: int) -> list[int]:
    """The numbers that divide `whole`, from 1 up.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0]
    return sorted({*small, *(whole // d for d in small)})


def nearest_numbers(value: int, valid: Iterable[int]) -> str:
    """The valid numbers on either side of `value`, for the end of a sentence.

    >>> nearest_numbers(96, [16, 32, 64, 128, 256])
    'nearest that do: 64, 128'
    """
    valid = sorted(set(valid))
    around = [v for v in valid if v < value][-1:] + [v for v in valid if v > value][:1]
    return f"nearest that do: {', '.join(map(str, around))}" if around else "nothing does"
