"""Rows that the budget implies because a value is held whole or not at all: a relaxation holds shares of values.

Say that three values of 4 bytes each may be held at a cut, and 11 bytes are free. A relaxation holds eleven twelfths of
each. Of whole values no more than two fit, and a row says so: sizes and room are divided by 4 and rounded down. Near
the smallest budget a cut has room for few large values, and there such rows matter. Which of them a solution breaks is
found by trying the sizes of the values of which it holds shares.

The rounding is that of Marchand, Wolsey, "Aggregation and mixed integer rounding to solve MIPs", Operations Research
49, 2001.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from planner.solving.step_cut import Model, Room, Row

_BROKEN = 1e-3
"""By so much a row must be broken to be worth adding."""

_NOTHING, _NO_SLACK = 1e-6, 1e-12
"""A share that is none, and what the rounding of a weight may come to."""

_SIZES = 15
"""So many sizes are tried for each cut, the largest ones, each whole, halved and quartered."""

_NEARLY = 0.99
"""A remainder of so much of what sizes are divided by leaves nothing to gain, and makes weights large."""


def broken_budgets(model: Model, columns: Sequence[float]) -> list[Row]:
    """Return rows that a solution breaks and no whole one does: for each cut the one that is broken most, if any is."""
    return [row for room in model.rooms for row in _broken(room, columns)]


def _broken(room: Room, columns: Sequence[float]) -> Iterator[Row]:
    # What is mostly held counts by what of it is not held: then all that is held whole or not at all adds nothing.
    there = {column for column in room.sizes if columns[column] >= 0.5}
    left_bytes = room.free_bytes - sum(room.sizes[column] for column in there)
    signed = {column: -size if column in there else size for column, size in room.sizes.items() if size}
    shares = [
        (size, 1.0 - columns[column] if column in there else columns[column])
        for column, size in signed.items()
        if _NOTHING < columns[column] < 1.0 - _NOTHING
    ]
    best, unit = 0.0, 0
    for tried in _units([abs(size) for size, _ in shares]):
        whole, rest = divmod(left_bytes, tried)
        if rest > _NEARLY * tried:
            continue
        weights = [_rounded(size, tried, rest) for size, _ in shares]
        over = sum(weight * share for weight, (_, share) in zip(weights, shares, strict=True)) - whole
        length = math.hypot(*weights)
        if over > _BROKEN and over > best * length:
            best, unit = over / length, tried
    if unit:
        whole, rest = divmod(left_bytes, unit)
        weights_of = {column: _rounded(size, unit, rest) for column, size in signed.items()}
        terms = [(column, w if column in there else -w) for column, w in weights_of.items() if w]
        most = whole - sum(weights_of[column] for column in there if column in weights_of)
        yield terms, -most - _NO_SLACK * sum(abs(weight) for _, weight in terms)


def _units(sizes: Sequence[int]) -> Iterator[int]:
    for size in sorted(set(sizes), reverse=True)[:_SIZES]:
        yield from {part: None for part in (size, size // 2, size // 4) if part > 1}


def _rounded(size: int, unit: int, rest: int) -> float:
    """Divide a size and round it down, but for what it has beyond the rest that the room leaves."""
    whole, part = divmod(size, unit)
    return whole + max(part - rest, 0) / (unit - rest)
