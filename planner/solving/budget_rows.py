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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.solving.step_cut import Cut, Model, Room, Row, has_no_slack

_BROKEN = 1e-3
"""By so much a row must be broken to be worth adding."""

_NOTHING, _NO_WEIGHT = 1e-6, 1e-12
"""A share that is none, and what the rounding of a weight may come to."""

_SIZES = 15
"""So many sizes are tried for each cut, the largest ones, each whole, halved and quartered."""

_NEARLY = 0.99
"""A remainder of so much of what sizes are divided by leaves nothing to gain, and makes weights large."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """A row, whatever the columns of its cut are."""

    cut: Cut
    there: frozenset[int]
    """Places among what the cut has room for: those that count by what of them is not held."""
    unit_bytes: int
    """What sizes are divided by."""


class BudgetRows:
    """The rows for a model of some cuts, those of roundings that are known already to begin with."""

    def __init__(self, model: Model, known: Iterable[Rounding] = ()) -> None:
        self.rooms = {room.cut: room for room in model.rooms}
        self.added: list[tuple[Rounding, Row]] = []
        """What the model has of these rows."""
        model.rows.extend(self._add(known))

    def broken(self, columns: Sequence[float]) -> list[Row]:
        """Return rows that a solution breaks, for each cut the one that is broken most, if any is; all are added."""
        return self._add(each for room in self.rooms.values() if (each := _most_broken(room, columns)) is not None)

    def tight(self, columns: Sequence[float]) -> list[Rounding]:
        """Return the roundings whose rows a solution leaves no slack."""
        return [each for each, row in self.added if has_no_slack(row, columns)]

    def _add(self, roundings: Iterable[Rounding]) -> list[Row]:
        possible = ((each, self.rooms[each.cut]) for each in roundings if each.cut in self.rooms)
        more = [(each, row) for each, room in possible if (row := _row(room, each)) is not None]
        self.added += more
        return [row for _, row in more]


def _most_broken(room: Room, columns: Sequence[float]) -> Rounding | None:
    # What is mostly held counts by what of it is not held: then all that is held whole or not at all adds nothing.
    there = frozenset(place for place, column in enumerate(room.sizes) if columns[column] >= 0.5)
    signed = _signed(room, there)
    left_bytes = _left_bytes(room, signed)
    shares = [
        (size, 1.0 - columns[column] if place in there else columns[column])
        for place, (column, size) in enumerate(zip(room.sizes, signed, strict=True))
        if size and _NOTHING < columns[column] < 1.0 - _NOTHING
    ]
    best, found = 0.0, None
    for unit in _units([abs(size) for size, _ in shares]):
        whole, rest = divmod(left_bytes, unit)
        if rest > _NEARLY * unit:
            continue
        weights = [_rounded(size, unit, rest) for size, _ in shares]
        over = sum(weight * share for weight, (_, share) in zip(weights, shares, strict=True)) - whole
        length = math.hypot(*weights)
        if over > _BROKEN and over > best * length:
            best, found = over / length, Rounding(room.cut, there, unit)
    return found


def _row(room: Room, rounding: Rounding) -> Row | None:
    """Round a cut's room; None if there is nothing to gain, as where some of it is left free."""
    signed = _signed(room, rounding.there)
    whole, rest = divmod(_left_bytes(room, signed), rounding.unit_bytes)
    if rest > _NEARLY * rounding.unit_bytes:
        return None
    weights = [_rounded(size, rounding.unit_bytes, rest) for size in signed]
    most = whole - sum(weights[place] for place in rounding.there)
    terms = [
        (column, weight if place in rounding.there else -weight)
        for place, (column, weight) in enumerate(zip(room.sizes, weights, strict=True))
        if weight
    ]
    return terms, -most - _NO_WEIGHT * sum(abs(weight) for weight in weights)


def _signed(room: Room, there: frozenset[int]) -> list[int]:
    return [-size if place in there else size for place, size in enumerate(room.sizes.values())]


def _left_bytes(room: Room, signed: Sequence[int]) -> int:
    return room.free_bytes + sum(size for size in signed if size < 0)


def _units(sizes: Sequence[int]) -> Iterator[int]:
    for size in sorted(set(sizes), reverse=True)[:_SIZES]:
        yield from {part: None for part in (size, size // 2, size // 4) if part > 1}


def _rounded(size: int, unit: int, rest: int) -> float:
    """Divide a size and round it down, but for what it has beyond the rest that the room leaves."""
    whole, part = divmod(size, unit)
    return whole + max(part - rest, 0) / (unit - rest)
