"""Rows that a programme of several cuts lacks: what is there later was there before, or something on its way ran.

In whole solutions they hold without being written down. A relaxation cheats where cuts are many: between two of them
it makes half of a value, in the next stretch it makes another half from the same half of an input, and says that it has
a whole one. So take a value that is there at a later cut, or is read after it, and a way back along which it was made.
At the earlier cut some value on that way was held, or the operation at its end has run since. Which of these rows are
broken is found by one pass over what runs again for each pair of cuts; they are too many to write down all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.ir.problem import Problem
from planner.solving.step_cut import Cut, Model, Row, is_binding

_BROKEN = 1e-3
"""By so much a row must be broken to be worth adding."""

_ROWS_AT_ONCE = 200

_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class Way:
    """A row, whatever the cuts between its own two are: what must be there, and the way on which it was made."""

    first: Cut
    until: Cut | None
    """Where the last stretch that counts ends; None stands for the end of the step."""
    values: tuple[int, ...]
    """From the one that must be there back to the one whose maker may have run."""
    reader: int | None
    """What runs again in the last stretch and reads the first of these values, if that is why it must be there."""
    at_end: bool
    """Whether it must be there because it is held where the last stretch ends. Else a first run in there reads it."""


class PathRows:
    """The rows for a model of some cuts, those of ways that are known already to begin with."""

    def __init__(self, problem: Problem, cuts: Sequence[Cut], model: Model, known: Iterable[Way] = ()) -> None:
        self.graph, self.model = problem.graph, model
        self.ends: list[Cut | None] = [*cuts, None]
        self.places: list[tuple[Way, int]] = []
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
        self.holds: list[list[tuple[int, float]]] = []
        """Of a solution: what each cut holds, and how much."""

        for way in known:
            if way.first in cuts and way.until in self.ends:
                self._add(way)

    def add_broken(self, columns: Sequence[float]) -> int:
        """Add the rows to the model that a solution breaks most, no more than are worth it at once; return how many."""
        self.runs = [_above_nothing(cut, columns) for cut in self.model.run_again]
        self.holds = [_above_nothing(cut, columns) for cut in self.model.held]
        found = [each for first in range(len(self.model.held) - 1) for each in self._broken_from(first, columns)]
        found.sort(key=lambda each: -each[0])
        before = len(self.places)
        for _, way in found[:_ROWS_AT_ONCE]:
            self._add(way)
        return len(self.places) - before

    def binding(self, prices: Sequence[float]) -> list[Way]:
        """Return the ways whose rows hold an optimum up, given the prices of the model's rows."""
        return [way for way, place in self.places if is_binding(prices[place])]

    def _add(self, way: Way) -> None:
        row = self._row(way)
        if row is not None:
            self.places.append((way, len(self.model.rows)))
            self.model.rows.append(row)

    def _broken_from(self, first: int, columns: Sequence[float]) -> Iterator[tuple[float, Way]]:
        """Return the ways of broken rows of an earlier cut, each with by how much."""
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
            for value, needed, reader, at_end in self._demands(first, last, columns):
                missing = needed - there[value] - made.get(producer[value], 0.0)
                if missing > _BROKEN:
                    values = [value]
                    while (maker := producer[values[-1]]) in via:
                        values.append(via[maker])
                    yield missing, Way(cut, self.ends[last + 1], tuple(values), reader, at_end)

    def _made(self, there: dict[int, float], ran: dict[int, float]) -> tuple[dict[int, float], dict[int, int]]:
        """Return how much of each operation can have run since a cut, and the input that limits it, if one does."""
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

    def _demands(
        self, first: int, last: int, columns: Sequence[float]
    ) -> Iterator[tuple[int, float, int | None, bool]]:
        """Return values of an earlier cut that must be there until the stretch after a later one ends.

        Beside each how much of it, and why, as in :class:`Way`.
        """
        model, held = self.model, self.model.held[first]
        for value in self.reads[last]:
            if value in held:
                yield value, 1.0, None, False
        for operation, share in self.runs[last]:
            if share > _BROKEN and operation in model.run_again[first]:
                for value in self.graph.operations[operation].inputs:
                    if value in held:
                        yield value, share, operation, False
        if last + 1 == len(model.held):
            return
        begins = model.begins[last + 1]
        for value, share in self.holds[last + 1]:
            if share > _BROKEN and value in held:
                begin = begins.get(self.graph.producer[value])
                yield value, share - (0.0 if begin is None else columns[begin]), None, True

    def _row(self, way: Way) -> Row | None:
        """Require of a way that something on it was held, or made; None if no cut is about that."""
        model = self.model
        first, until = self.ends.index(way.first), self.ends.index(way.until)
        terms = [(model.held[first][u], 1.0) for u in way.values]
        maker = self.graph.producer[way.values[-1]]
        terms += [(cut[maker], 1.0) for cut in model.run_again[first:until] if maker in cut]
        if way.reader is not None:
            column = model.run_again[until - 1].get(way.reader)
            return None if column is None else (_added_up([*terms, (column, -1.0)]), 0.0)
        if not way.at_end:
            return _added_up(terms), 1.0
        value = way.values[0]
        column, begin = model.held[until].get(value), model.begins[until].get(self.graph.producer[value])
        if begin is not None:
            terms.append((begin, 1.0))
        return None if column is None else (_added_up([*terms, (column, -1.0)]), 0.0)


def _added_up(terms: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return terms with each column once: what reads a value may be what makes it on its way. HiGHS never ends else."""
    weights: dict[int, float] = {}
    for column, weight in terms:
        weights[column] = weights.get(column, 0.0) + weight
    return [(column, weight) for column, weight in weights.items() if weight]


def _above_nothing(shares: dict[int, int], columns: Sequence[float]) -> list[tuple[int, float]]:
    return [(each, columns[column]) for each, column in shares.items() if columns[column] > _NOTHING]
