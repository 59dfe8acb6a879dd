"""Cutting planes of the step-cut programme: rows that every whole plan keeps and its relaxation breaks.

*Path rows.* Between many cuts a relaxation makes half of a value, in the next stretch another half from the same half
of an input, and says that it has a whole one. So take a value that a first run after a later cut reads, and a path back
along which it was made. At the earlier cut some value on that path was held, or the operation at its end has run since.
Which of these rows are broken is found by one pass over what is recomputed for each pair of cuts; they are too many to
write down all.

*Budget rows.* Say that three values of 4 bytes each may be held at a cut, and 11 bytes are free. A relaxation holds
eleven twelfths of each. Of whole values no more than two fit, and a row says so: sizes and room are divided by 4 and
rounded down (Marchand, Wolsey, "Aggregation and mixed integer rounding to solve MIPs", Operations Research 49, 2001).
Near the smallest budget a cut has room for few large values, and there such rows matter. Which of them a solution
breaks is found by trying the sizes of the values of which it holds shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.ir.problem import Problem
from planner.solving.step_cut import Cut, Model, Room, Row, is_binding

_BROKEN = 1e-3
"""By so much a row must be broken to be worth adding."""

_ROWS_AT_ONCE = 200
"""Path rows that are added at a time."""

_NOTHING = 1e-9
"""A share of a value or a run that is none."""

_UNDECIDED, _NO_WEIGHT = 1e-6, 1e-12
"""A share this near to 0 or 1 is whole; and what the rounding of a weight may come to."""

_SIZES = 15
"""So many sizes are tried for each cut, the largest ones, each whole, halved and quartered."""

_NEARLY = 0.99
"""A remainder of so much of what sizes are divided by leaves nothing to gain, and makes weights large."""


@dataclass(frozen=True, slots=True)
class Path:
    """A path inequality between two cuts: a value required at the later, and the path along which it was recomputed."""

    first: Cut
    until: Cut | None
    """Where the last stretch that counts ends; None stands for the end of the step."""
    values: tuple[int, ...]
    """From the one that a first run in the last stretch reads back to the one whose maker may have run."""


class PathRows:
    """Path inequalities for a model's cuts, starting with those of known paths."""

    def __init__(self, problem: Problem, cuts: Sequence[Cut], model: Model, known: Iterable[Path] = ()) -> None:
        self.graph, self.model = problem.graph, model
        self.ends: list[Cut | None] = [*cuts, None]
        self.places: list[tuple[Path, int]] = []
        """Where the model has these rows."""
        operations, producer = self.graph.operations, self.graph.producer
        ends = [*(cut.latest for cut in cuts[1:]), len(operations) - 1]
        self.reads: list[list[int]] = []
        """Values made before each cut that first runs between it and the next read."""
        for cut, end in zip(cuts, ends, strict=True):
            read = {u for operation in operations[cut.latest + 1 : end + 1] for u in operation.inputs}
            self.reads.append(sorted(u for u in read if producer[u] <= cut.latest))
        self.runs: list[list[tuple[int, float]]] = []
        """Of a solution: what runs again after each cut, and how much."""

        for path in known:
            if path.first in cuts and path.until in self.ends:
                self._add(path)

    def add_broken(self, columns: Sequence[float]) -> int:
        """Add the rows that a solution violates most, a limited number at once; return how many."""
        self.runs = [
            [(each, columns[column]) for each, column in cut.items() if columns[column] > _NOTHING]
            for cut in self.model.run_again
        ]
        found = [each for first in range(len(self.model.held) - 1) for each in self._broken_from(first, columns)]
        found.sort(key=lambda each: -each[0])
        before = len(self.places)
        for _, path in found[:_ROWS_AT_ONCE]:
            self._add(path)
        return len(self.places) - before

    def binding(self, prices: Sequence[float]) -> list[Path]:
        """Return the paths of binding rows, given the dual prices of the model's rows."""
        return [path for path, place in self.places if is_binding(prices[place])]

    def _add(self, path: Path) -> None:
        self.places.append((path, len(self.model.rows)))
        self.model.rows.append(self._row(path))

    def _broken_from(self, first: int, columns: Sequence[float]) -> Iterator[tuple[float, Path]]:
        """Return the paths of violated rows of an earlier cut, each with its violation."""
        held, again, producer = self.model.held[first], self.model.run_again[first], self.graph.producer
        cut = self.ends[first]
        assert cut is not None
        there = {u: columns[column] for u, column in held.items()}
        ran: dict[int, float] = {}
        for last in range(first, len(self.model.held)):
            for operation, share in self.runs[last]:
                if operation in again:
                    ran[operation] = ran.get(operation, 0.0) + share
            if last == first:
                continue
            made, via = self._made(there, ran)
            for value in self.reads[last]:
                missing = 1.0 - there.get(value, 1.0) - made.get(producer[value], 0.0)
                if missing > _BROKEN:
                    values = [value]
                    while (maker := producer[values[-1]]) in via:
                        values.append(via[maker])
                    yield missing, Path(cut, self.ends[last + 1], tuple(values))

    def _made(self, there: dict[int, float], ran: dict[int, float]) -> tuple[dict[int, float], dict[int, int]]:
        """Return how much of each operation can have run since a cut, and the input that limits it, if any."""
        operations, producer = self.graph.operations, self.graph.producer
        made: dict[int, float] = {}
        via: dict[int, int] = {}
        for operation in sorted(ran):
            most = min(ran[operation], 1.0)
            for value in operations[operation].inputs:
                if value in there:
                    source = there[value] + made.get(producer[value], 0.0)
                    if source < most - _NOTHING:
                        most, via[operation] = source, value
            made[operation] = most
        return made, via

    def _row(self, path: Path) -> Row:
        """Require that some value on a path was held or recomputed."""
        model = self.model
        first, until = self.ends.index(path.first), self.ends.index(path.until)
        terms = [(model.held[first][u], 1.0) for u in path.values]
        maker = self.graph.producer[path.values[-1]]
        terms += [(cut[maker], 1.0) for cut in model.run_again[first:until] if maker in cut]
        return _added_up(terms), 1.0


def _added_up(terms: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Merge terms of equal columns: HiGHS does not end if a row names a column twice."""
    weights: dict[int, float] = {}
    for column, weight in terms:
        weights[column] = weights.get(column, 0.0) + weight
    return [(column, weight) for column, weight in weights.items() if weight]


@dataclass(frozen=True, slots=True)
class Rounding:
    """A rounding of a cut's budget row, independent of the model's columns."""

    cut: Cut
    there: frozenset[int]
    """Places among what the cut has room for: those that count by what of them is not held."""
    unit_bytes: int
    """What sizes are divided by."""


class BudgetRows:
    """Rounded budget rows for a model's cuts, starting with known roundings."""

    def __init__(self, model: Model, known: Iterable[Rounding] = ()) -> None:
        self.model = model
        self.rooms = {room.cut: room for room in model.rooms}
        self.places: list[tuple[Rounding, int]] = []
        """Where the model has these rows."""
        self._add(known)

    def add_broken(self, columns: Sequence[float]) -> int:
        """Add each cut's most violated row to the model, if any; return how many."""
        before = len(self.places)
        self._add(each for room in self.rooms.values() if (each := _most_broken(room, columns)) is not None)
        return len(self.places) - before

    def binding(self, prices: Sequence[float]) -> list[Rounding]:
        """Return the roundings of binding rows, given the dual prices of the model's rows."""
        return [each for each, place in self.places if is_binding(prices[place])]

    def _add(self, roundings: Iterable[Rounding]) -> None:
        for each in roundings:
            room = self.rooms.get(each.cut)
            if room is not None and (row := _budget_row(room, each)) is not None:
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
        if size and _UNDECIDED < columns[column] < 1.0 - _UNDECIDED
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


def _budget_row(room: Room, rounding: Rounding) -> Row | None:
    """Round a cut's budget row; None if that cuts nothing off, as where the row is slack."""
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
    """Mixed-integer rounding of one coefficient."""
    whole, part = divmod(size, unit)
    return whole + max(part - rest, 0) / (unit - rest)
