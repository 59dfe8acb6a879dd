"""Parse an axis of budgets or sizes, ``1..64``, ``1,2,4`` or a Python list, into its values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.common.units import is_share, parse_size
from planner.errors import UsageError

_LARGEST_COARSE_STEP = 64

DEFAULT_POINTS = 20
"""Budgets on a curve, unless another number is asked for."""


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Sizes to look at, in rising order: of a range written with two dots, its ends and the powers of two between.

    It is dense if every whole number between two values may be looked at too.
    """

    values: tuple[int, ...]
    is_dense: bool = False

    @property
    def coarse_step(self) -> int:
        """The power of two that the range begins with, at most 64: for sizes of which single steps mean little."""
        return min(_LARGEST_COARSE_STEP, 1 << (self.values[0].bit_length() - 1))


def as_typed(given: str | int | Iterable[object]) -> str:
    """Return what would be typed for values that are listed in Python; text stays.

    >>> as_typed([1, 2, 4]), as_typed("1..64"), as_typed(8)
    ('1,2,4', '1..64', '8')
    """
    return ",".join(map(str, given)) if isinstance(given, Iterable) and not isinstance(given, str) else str(given)


def parse_sizes(text: str, *, what: str) -> SizeRange:
    """Read sizes as people write them: ``"1..64"``, ``"1,2,4"`` or ``"8"``; ``what`` they are of is for the message.

    >>> parse_sizes("3..20", what="batch sizes")
    SizeRange(values=(3, 4, 8, 16, 20), is_dense=True)
    >>> parse_sizes("1,2,6", what="batch sizes").values
    (1, 2, 6)
    """
    low, dots, high = text.partition("..")
    if dots:
        first, last = _size(low, text, what), _size(high, text, what)
        if first > last:
            raise UsageError(f"{what} {text!r} are an empty range: write the smaller end first, {last}..{first}")
        powers = (1 << shift for shift in range(last.bit_length()))
        return SizeRange(tuple(sorted({first, last, *(power for power in powers if first < power < last)})), True)
    values = tuple(_size(part, text, what) for part in text.split(","))
    _check_rising(values, text, what)
    return SizeRange(values)


def _size(part: str, text: str, what: str) -> int:
    part = part.strip()
    if not (part.isascii() and part.isdigit() and 0 < int(part[:19]) < 2**31):
        raise UsageError(f"cannot read {what} {text!r}: write 1..64 or 1,2,4, whole numbers above zero")
    return int(part)


def _check_rising(values: Sequence[int], text: str, what: str) -> None:
    if any(before >= after for before, after in pairwise(values)):
        raise UsageError(f"{what} {text!r} are out of order: each must be above the one before it")


def points_and_range(budgets: int | str | Iterable[object]) -> tuple[int, str | None]:
    """Read how many budgets are asked for, and where they lie, None for anywhere; what cannot be read is refused.

    >>> points_and_range(8), points_and_range("4GiB..16GiB:8"), points_and_range(["4GiB", "8GiB"])
    ((8, None), (8, '4GiB..16GiB'), (20, '4GiB,8GiB'))
    """
    points, text = DEFAULT_POINTS, None
    if isinstance(budgets, int):
        points = budgets
    else:
        text, colon, number = as_typed(budgets).partition(":")
        if colon:
            points = _size(number, number, "a number of points")
        check_budgets(text)
    if points < 2:
        raise UsageError(f"a curve has at least 2 points, not {points}")
    return points, text


def check_budgets(text: str) -> None:
    """Refuse budgets that cannot be read, and those of which it shows at once that they do not rise."""
    parts = _parts(text)
    if len({is_share(part) for part in parts}) == 1:
        parse_budgets(text, whole_bytes=2**60, points=2)
    for part in parts:
        parse_size(part, whole_bytes=2**60)


def parse_budgets(text: str, *, whole_bytes: int, points: int) -> tuple[int, ...]:
    """Read budgets: a list, ``"4GiB,8GiB,16GiB"``, or a range, ``"30%..100%"``, of which so many points are taken.

    >>> parse_budgets("25%..100%", whole_bytes=400, points=4)
    (100, 200, 300, 400)
    """
    values = [parse_size(part, whole_bytes=whole_bytes) for part in _parts(text)]
    _check_rising(values, text, "budgets")
    return spread(values[0], values[1], points) if ".." in text else tuple(values)


def _parts(text: str) -> list[str]:
    parts = text.split("..") if ".." in text else text.split(",")
    if (".." in text and len(parts) != 2) or not all(part.strip() for part in parts):
        raise UsageError(f"cannot read budgets {text!r}: write 4GiB..16GiB, or 4GiB,8GiB,16GiB")
    return parts


def spread(low: int, high: int, points: int) -> tuple[int, ...]:
    """Return equally spaced integers between two ends, both included.

    >>> spread(10, 20, 3), spread(7, 7, 3)
    ((10, 15, 20), (7,))
    """
    steps = max(points - 1, 1)
    return tuple(sorted({low + (high - low) * step // steps for step in range(steps + 1)}))
