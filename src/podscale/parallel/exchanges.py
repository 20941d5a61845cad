"""The exchanges of Swing: which chips of a row or column send to each other, how far, and over which links.

Swing (De Sensi et al. 2024, arXiv 2401.09356) sums over n = 2^k chips of a ring in k steps. In step s a chip exchanges
data with the one at distance |rho(s)|, where rho(s) = 1 - 2 + 4 - ... (-2)^s: 1, 1, 3, 5, 11, ... Even and odd chips
look in opposite directions, and each chip swings from one side to the other. The distances add up to a third less than
those of recursive doubling, and fewer messages share a link.

If n has odd factors, the chips first form blocks of as many neighbours as the factor says, one factor after the other,
and the sum of a block takes part in the next stage as one chip. No array library is needed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np

from podscale.parallel.routes import CROSS_SLICES, Chips, Path, Route

MAX_PATHS = 4  # one for each link of a chip, so that all four carry data at once
Group = tuple[int, ...]  # positions along a row or column, in the order of what each of them owns


@dataclass(frozen=True)
class Exchange(Route):
    """Groups of chips in every row or column, each of which is a cycle of its own; hops may be several links long."""

    groups: tuple[Group, ...] = ()

    def list_cycles(self, chips: Chips) -> Chips:
        """Return the cycles through chips [slices, rows, columns]: [cycles, chips of a cycle]."""
        lines = chips if self.along == "row" else chips.swapaxes(1, 2)
        cycles = lines.reshape(-1, lines.shape[-1])[:, np.array(self.groups)]
        return cycles.reshape(-1, len(self.groups[0]))

    def count_chips(self, rows: int, cols: int, slices: int = 1) -> int:
        """Return the chips of a cycle."""
        return len(self.groups[0])

    def list_hops(self) -> list[tuple[int, int]]:
        """Return the positions (from, to) of all messages of a hop in one row or column."""
        return [hop for group in self.groups for hop in zip(group, group[1:] + group[:1], strict=True)]


def measure_span(hops: Sequence[tuple[int, int]], length: int) -> tuple[int, int]:
    """Return the links of the longest of these hops, and the messages on the link that most of them share.

    Args:
        hops: positions (from, to) on a ring; each message takes the shorter way, or the forward one of two equal ways.
        length: chips of the ring.

    >>> measure_span([(0, 1), (1, 0), (2, 3), (3, 2)], 4), measure_span([(0, 3), (2, 5), (4, 7), (6, 1)], 8)
    ((1, 1), (3, 2))
    """
    used = Counter[tuple[int, int]]()
    longest = 0
    for start, end in hops:
        ahead = (end - start) % length
        direction, links = (1, ahead) if 2 * ahead <= length else (-1, length - ahead)
        used.update(((start + direction * i) % length, direction) for i in range(links))
        longest = max(longest, links)
    return longest, max(used.values(), default=0)


# --- one ring ------------------------------------------------------------------------------------------------------


def factor_odd(count: int) -> tuple[int, list[int]]:
    """Return the largest power of two that divides a number, and the prime factors of the quotient.

    >>> factor_odd(24), factor_odd(45), factor_odd(1)
    ((8, [3]), (1, [3, 3, 5]), (1, []))
    """
    power = count & -count
    odd, primes, prime = count // power, list[int](), 3
    while odd > 1:
        while odd % prime == 0:
            primes.append(prime)
            odd //= prime
        prime += 2
    return power, primes


def find_partners(count: int, step: int, *, is_mirrored: bool = False) -> list[int]:
    """Return the chip that each chip of a ring exchanges data with in one step of Swing.

    Args:
        count: chips of the ring, a power of two.
        step: from 0.
        is_mirrored: even chips look where odd ones would, which uses the links that the others leave free.

    >>> find_partners(8, 0), find_partners(8, 2)
    ([1, 0, 3, 2, 5, 4, 7, 6], [3, 6, 5, 0, 7, 2, 1, 4])
    """
    reach = (1 - (-2) ** (step + 1)) // 3 * (-1 if is_mirrored else 1)
    return [(chip + (reach if chip % 2 == 0 else -reach)) % count for chip in range(count)]


def list_pairs(count: int, *, is_mirrored: bool = False) -> list[tuple[Group, ...]]:
    """Return the pairs of each step on a ring of 2^k chips, such that halving in every step divides the data.

    In a step, both chips of a pair hold the same part of the data, and each keeps the half that it or a chip that it
    reaches in later steps will own. The first chip of a pair keeps the first half.
    """
    steps = [find_partners(count, step, is_mirrored=is_mirrored) for step in range(count.bit_length() - 1)]
    owned = [{chip} for chip in range(count)]  # by the chips that a chip reaches in later steps
    pairs: list[tuple[Group, ...]] = []
    for partners in reversed(steps):
        pairs.append(
            tuple((chip, other) for chip, other in enumerate(partners) if min(owned[chip]) < min(owned[other]))
        )
        owned = [owned[chip] | owned[other] for chip, other in enumerate(partners)]
    return pairs[::-1]


def _list_blocks(count: int) -> Iterator[tuple[Group, ...]]:
    """Yield, for each odd factor of a ring's length, the blocks of as many neighbours."""
    stride = 1
    for prime in factor_odd(count)[1]:
        firsts = [chip for chip in range(count) if chip // stride % prime == 0]
        yield tuple(tuple(first + i * stride for i in range(prime)) for first in firsts)
        stride *= prime


# --- reduce-scatter and all-gather by halving ----------------------------------------------------------------------


def make_paths(rows: int, cols: int, count: int = 1) -> tuple[Path, ...]:
    """Return the paths of Swing on slices of rows x columns, an equal part of the data along each.

    Steps along rows and columns alternate, so that large messages go to near chips. Two of four paths begin with
    columns, and two are mirrored: where rows and columns are powers of two, no two paths use the same link at first.
    """
    return tuple(_make_path(rows, cols, number) for number in range(min(count, MAX_PATHS)))


def _make_path(rows: int, cols: int, number: int) -> Path:
    is_mirrored, starts_down = bool(number % 2), number // 2 % 2
    sizes: dict[Literal["row", "column"], int] = {"row": cols, "column": rows}
    path: list[Route] = []
    steps: list[list[Route]] = []
    for along, count in sizes.items():
        for blocks in _list_blocks(count):
            path.append(Exchange(along, groups=tuple(block[::-1] for block in blocks) if is_mirrored else blocks))
        power, stride = count & -count, count // (count & -count)
        pairs = list_pairs(power, is_mirrored=is_mirrored)
        steps.append([Exchange(along, groups=_spread(groups, stride)) for groups in pairs])
    first, second = steps[::-1] if starts_down else steps
    path += [step for both in zip_longest(first, second) for step in both if step]
    return (*path, CROSS_SLICES)


def _spread(groups: Sequence[Group], stride: int) -> tuple[Group, ...]:
    """Return the groups of every chip of a block, where the numbers in `groups` are those of blocks of neighbours."""
    return tuple(tuple(chip * stride + i for chip in group) for group in groups for i in range(stride))


# --- whole arrays --------------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """A message that all chips along a dimension send at the same time."""

    along: str  # "row", "column" or "slice"
    sources: tuple[int, ...]  # by position, from which chip a chip receives
    copies: int  # arrays of the sum's size that it holds
    orders: tuple[tuple[int, ...], ...] = ()  # after it, by position: in which order to add all arrays held; or ()


def list_messages(along: str, count: int, *, is_ring: bool = True) -> list[Message]:
    """Return the messages after which every one of `count` chips has the sum of all, with the same bits.

    A chip adds what it holds as soon as any two chips hold the same arrays or no array in common: then all add the same
    numbers in the same order. With Swing's steps that is so after the first, the second of a ring of four, and the
    last; until then a chip holds several arrays and sends all of them.

    Args:
        along: "row", "column" or "slice".
        count: chips.
        is_ring: whether the last chip is linked to the first; else partners are those of recursive doubling.
    """
    held = [[chip] for chip in range(count)]  # by position: the numbers of partial sums, in the order of their arrival
    messages: list[Message] = []
    for stage in _list_stages(count, is_ring):
        sent = held
        for sources in stage:
            held = [mine + sent[source] for mine, source in zip(held, sources, strict=True)]
            messages.append(Message(along, tuple(sources), len(sent[0])))
        sets = {frozenset(numbers) for numbers in held}
        if sum(map(len, sets)) == len(frozenset[int]().union(*sets)):
            orders = tuple(tuple(sorted(range(len(numbers)), key=numbers.__getitem__)) for numbers in held)
            messages[-1] = messages[-1]._replace(orders=orders)
            held = [[min(numbers)] for numbers in held]
    return messages


def _list_stages(count: int, is_ring: bool) -> Iterator[list[list[int]]]:
    """Yield, for each stage, the messages that follow from what a chip holds at its start: by position, from where."""
    for blocks in _list_blocks(count):
        places = {chip: (block, i) for block in blocks for i, chip in enumerate(block)}
        size = len(blocks[0])
        yield [[block[(i + k) % size] for block, i in map(places.__getitem__, range(count))] for k in range(1, size)]
    power = count & -count
    stride = count // power
    for step in range(power.bit_length() - 1):
        partners = find_partners(power, step) if is_ring else [chip ^ (1 << step) for chip in range(power)]
        yield [[partners[chip // stride] * stride + chip % stride for chip in range(count)]]
