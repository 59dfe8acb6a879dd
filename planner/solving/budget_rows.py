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

from planner.solving.step_cut import Cut, Model, Room, Row, is_binding

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
        self.model = model
        self.rooms = {room.cut: room for room in model.rooms}
        self.places: list[tuple[Rounding, int]] = []
        """Where the model has these rows."""
        self._add(known)

    def add_broken(self, columns: Sequence[float]) -> int:
        """Add the row to the model that a solution breaks most of each cut's, if it breaks any; return how many."""
        before = len(self.places)
        self._add(each for room in self.rooms.values() if (each := _most_broken(room, columns)) is not None)
        return len(self.places) - before

    def binding(self, prices: Sequence[float]) -> list[Rounding]:
        """Return the roundings whose rows hold an optimum up, given the prices of the model's rows."""
        return [each for each, place in self.places if is_binding(prices[place])]

    def _add(self, roundings: Iterable[Rounding]) -> None:
        for each in roundings:
            room = self.rooms.get(each.cut)
            if room is not None and (row := _row(room, each)) is not None:
                self.places.append((each, len(self.model.rows)))
                self.model.rows.append(row)


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
    there = frozenset(place for place in rounding.there if place < len(room.sizes))  # with any choice it holds
    signed = _signed(room, there)
    whole, rest = divmod(_left_bytes(room, signed), rounding.unit_bytes)
    if rest > _NEARLY * rounding.unit_bytes:
        return None
    weights = [_rounded(size, rounding.unit_bytes, rest) for size in signed]
    most = whole - sum(weights[place] for place in there)
    terms = [
        (column, weight if place in there else -weight)
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
