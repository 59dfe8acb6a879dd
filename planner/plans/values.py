"""Table of saved activations: which a plan saves, recomputes or offloads, and the cost of the other choice.

A plan file keeps this table, so that a plan can be explained, and compared with another, without its graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from planner.ir.graph import Phase, named_by
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRow:
    """One storage that the forward makes, and that the backward, or what is run again for it, reads.

    Steps are operations of the base order, counted from 0; what is run again counts to the step before which it is.
    A value lies *idle* between the last run of the forward that touches it and the first run of the backward that
    does, from step ``idle_from`` to ``idle_to``; one that is dropped, until it is made again. ``excess_bytes`` is how
    far the step without recompute is above the budget at most in these steps, ``busiest_bytes`` the most that the
    device holds by the plan meanwhile; 0 if it is never above, or the value never idle.

    The value is result ``output`` of the operation with this key, which the plan runs so often, for so many seconds
    each time. It is ``kept`` if its first copy is held into the backward; ``needed`` if the backward itself reads it,
    and not only what is run again, or the caller; ``retained`` if it is held to the end of the step whatever a plan
    says; ``offloaded`` if it waits in the host's memory. ``made_from`` are rows of what its operation reads, as far as
    they are in the table.

    ``again_runs`` and ``again_seconds``: if it is kept, or offloaded, the runs that dropping it would add, which make
    it where it is first needed, from what the plan holds there, without what the plan runs again anyway. If not, what
    it costs: the added runs of its operation, and those of others that are for these alone. None if it could not
    be made again.
    """

    operation: str
    output: int
    size_bytes: int
    kept: bool
    needed: bool
    retained: bool
    repeatable: bool
    runs: int
    seconds: float
    again_runs: int
    again_seconds: float | None
    made_from: tuple[int, ...]
    idle_from: int
    idle_to: int
    excess_bytes: int
    busiest_bytes: int
    spans_baseline_peak: bool
    spans_peak: bool
    offloaded: bool = field(default=False, metadata={"older": True})

    @property
    def module(self) -> str:
        """Path of the module that makes it."""
        return named_by(self.operation)[0]

    @property
    def dropped(self) -> bool:
        """Whether it is recomputed for the backward."""
        return self.needed and not self.kept and not self.offloaded

    @property
    def target(self) -> str:
        """The operator that makes it."""
        return named_by(self.operation)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTable:
    """The values of a step in the order in which they are made, and where its peak stands without the plan and with."""

    steps: int
    baseline_peak_step: int
    peak_step: int
    rows: tuple[ValueRow, ...] = field(metadata={"columns": True})


def value_table(problem: Problem, schedule: Schedule) -> ValueTable | None:
    """Tabulate what a schedule does with each value; None for an empty step. O(values x runs) at worst."""
    return _Table(problem, schedule).table() if schedule.order else None


class _Table:
    """Builds the rows in one pass over a schedule."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.order = problem, schedule.order
        self.graph, self.costs = problem.graph, problem.costs
        operations = self.graph.operations
        self.evaluation = problem.evaluate(schedule)
        self.offloaded = {offload.value for offload in schedule.offloads}
        self.fetched = schedule.returning(self.graph)
        """For each position, the values that are fetched right before it."""
        self.step_of: list[int] = []
        """For each position, the step that is under way."""
        self.runs_of: list[list[int]] = [[] for _ in operations]
        """For each operation, the positions of its runs."""
        self.copies: list[list[list[int]]] = [[] for _ in self.graph.values]
        """For each value, its copies: the position that makes one, then those that read it."""
        self.sources: list[list[int]] = [[] for _ in self.order]
        """For each position, those of the runs that make what it reads."""
        self.readers: list[set[int]] = [set() for _ in self.order]
        """For each position, those that read what it makes."""
        self._follow()
        self.turn = next((i for i, op in enumerate(operations) if op.phase is Phase.BACKWARD), len(operations))
        self.begins = bisect_left(self.step_of, self.turn)
        """The position where the backward begins, what is run again for it included."""

    def _follow(self) -> None:
        made_at: dict[int, int | None] = {}  # None: the copy at hand was fetched
        for position, index in enumerate(self.order):
            operation = self.graph.operations[index]
            again = bool(self.runs_of[index])
            for value in self.fetched.get(position, ()):
                self.copies[value].append([position])
                made_at[value] = None
            for value in operation.inputs:
                current = 0 if self.graph.values[value].retained else -1
                self.copies[value][current].append(position)
                if (source := made_at.get(value)) is not None:
                    self.sources[position].append(source)
                    self.readers[source].add(position)
            for value in operation.outputs:
                self.copies[value].append([position])
                if not (again and self.graph.values[value].retained):
                    made_at[value] = position
            self.runs_of[index].append(position)
            self.step_of.append(-1 if again else index)
        for position in range(len(self.order) - 2, -1, -1):
            if self.step_of[position] < 0:
                self.step_of[position] = self.step_of[position + 1]

    def table(self) -> ValueTable:
        forward = (operation for operation in self.graph.operations if operation.phase is Phase.FORWARD)
        shown = [
            value
            for operation in forward
            for value in operation.outputs
            if self._needed(value)
            or self._is_kept(value)
            or value in self.offloaded
            or len(self.runs_of[self.graph.producer[value]]) > 1
        ]
        row_of = {value: row for row, value in enumerate(shown)}
        return ValueTable(
            steps=len(self.graph.operations),
            baseline_peak_step=self.problem.baseline.peak_position,
            peak_step=self.step_of[self.evaluation.peak_position],
            rows=tuple(self._row(value, row_of) for value in shown),
        )

    def _needed(self, value: int) -> bool:
        return bool(self.graph.readers[value]) and self.graph.readers[value][-1] >= self.turn

    def _is_kept(self, value: int) -> bool:
        return self.graph.values[value].retained or self.copies[value][0][-1] >= self.begins

    def _row(self, value: int, row_of: dict[int, int]) -> ValueRow:
        producer = self.graph.producer[value]
        operation, size_bytes = self.graph.operations[producer], self.graph.values[value].size_bytes
        kept = self._is_kept(value)
        start, end = self._idle(value, kept)
        while_idle = range(start + 1, end)
        first, last = self._idle_without_recompute(value, self.step_of[min(end, len(self.order) - 1)])
        baseline = self.problem.baseline
        over_bytes = max(baseline.timeline_bytes[first + 1 : last], default=0) - self.problem.budget_bytes
        held_bytes = max(self.evaluation.timeline_bytes[start + 1 : end], default=0)
        stays = kept or value in self.offloaded
        again = self._to_drop(value, end) if stays else self._spent_on(producer)
        key, output = operation.made_by(operation.outputs.index(value))
        return ValueRow(
            operation=key,
            output=output,
            size_bytes=size_bytes,
            kept=kept,
            needed=self._needed(value),
            retained=self.graph.values[value].retained,
            repeatable=operation.recomputable,
            runs=len(self.runs_of[producer]),
            seconds=self.costs[producer].seconds,
            again_runs=sum(again.values()) if again is not None else 0,
            again_seconds=None if again is None else sum(n * self.costs[i].seconds for i, n in sorted(again.items())),
            made_from=tuple(row_of[v] for v in operation.inputs if v in row_of),
            idle_from=self.step_of[start],
            idle_to=self.step_of[min(end, len(self.order) - 1)],
            excess_bytes=max(over_bytes, 0) if while_idle else 0,
            busiest_bytes=held_bytes + self.graph.total_static_bytes if while_idle else 0,
            spans_baseline_peak=self._needed(value) and first < baseline.peak_position < last,
            spans_peak=self.evaluation.peak_position in while_idle,
            offloaded=value in self.offloaded,
        )

    def _idle(self, value: int, kept: bool) -> tuple[int, int]:
        """Return the positions between which a value is idle: two runs, or a run and the end of the step."""
        copies = self.copies[value]
        if not kept:
            return copies[0][-1], copies[1][0]
        place = bisect_left(copies[0], self.begins)
        return copies[0][place - 1], copies[0][place] if place < len(copies[0]) else len(self.order)

    def _idle_without_recompute(self, value: int, until: int) -> tuple[int, int]:
        """Return the steps between which it lies idle without recompute; one that only recompute needs, until then."""
        touched = (self.graph.producer[value], *self.graph.readers[value])
        late = next((step for step in touched if step >= self.turn), until)
        return max(step for step in touched if step < self.turn), late

    def _to_drop(self, value: int, position: int) -> dict[int, int] | None:
        """Return the runs that recomputing a value at a position would add, by operation; None if impossible."""
        again: dict[int, int] = {}
        pending = [value]
        while pending:
            producer = self.graph.producer[pending.pop()]
            if producer in again:
                continue
            if not self.graph.operations[producer].recomputable:
                return None
            again[producer] = 1
            pending.extend(v for v in self.graph.operations[producer].inputs if not self._is_held(v, position))
        return {index: 1 for index in again if len(self.runs_of[index]) == 1}

    def _spent_on(self, producer: int) -> dict[int, int]:
        """Return the added runs of an operation, and those of others that serve only them."""
        spent = set(self.runs_of[producer][1:])
        pending = list(spent)
        while pending:
            for source in self.sources[pending.pop()]:
                is_again = source != self.runs_of[self.order[source]][0]
                if is_again and source not in spent and self.readers[source] <= spent:
                    spent.add(source)
                    pending.append(source)
        return Counter(self.order[position] for position in spent)

    def _is_held(self, value: int, position: int) -> bool:
        if self.graph.values[value].retained:
            return self.copies[value][0][0] < position
        return any(copy[0] < position <= copy[-1] for copy in self.copies[value])
