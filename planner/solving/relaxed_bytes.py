"""Live bytes of a relaxed solution between its cuts: where it breaks the budget most, the next cuts go.

A relaxation holds shares of values and runs shares of operations again. It is carried out as a whole solution is, all
as late as it may, a share at a time: what is there of each value at each first run follows, and so do bytes. They prove
nothing. They say where the relaxation gets away with most, which a solution that is rounded to a plan does not: that
one breaks the budget wherever shares were rounded up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from planner.ir.problem import Problem
from planner.solving.step_cut import Cut, Model

_NOTHING = 1e-9


def bytes_between(
    problem: Problem, cuts: Sequence[Cut], model: Model, columns: Sequence[float]
) -> list[dict[int, float]]:
    """Estimate the live bytes of a relaxed solution at each first run between two cuts.

    O(values + reads) for each cut, and O(reads of what changes) for each first run.
    """
    ends = [*(cut.step for cut in cuts[1:]), len(problem.graph.operations)]
    return [
        _Stretch(problem, model, columns, number, cut.latest + 1, end).bytes()
        for number, (cut, end) in enumerate(zip(cuts, ends, strict=True))
    ]


class _Stretch:
    """First runs between two cuts, and the recomputations among them."""

    def __init__(
        self, problem: Problem, model: Model, columns: Sequence[float], number: int, begin: int, end: int
    ) -> None:
        self.graph, self.costs = problem.graph, problem.costs
        self.begin, self.end = begin, end
        readers, again = self.graph.readers, model.run_again[number].items()
        self.there = {u: columns[column] for u, column in model.held[number].items()}
        """How much there is of each value that the cut need not hold; of others there is the whole."""
        self.left = {o: columns[column] for o, column in again if columns[column] > _NOTHING}
        """How much of each operation is still to run again."""
        self.at_end = {u: 1.0 for u, those in enumerate(readers) if those and those[-1] >= end}
        """How much of each value must be there when the stretch ends."""
        if number + 1 < len(model.held):
            self.at_end.update((u, columns[column]) for u, column in model.held[number + 1].items())
        self.sizes = [0 if value.retained else value.size_bytes for value in self.graph.values]
        self.shares: dict[int, float] = {}
        """How much of each value there was at the last first run; others are not there."""
        self.changed = set[int]()
        """Values of which there may be more or less at the next."""
        self.total_bytes = 0.0

    def bytes(self) -> dict[int, float]:
        """Simulate the stretch from one first run to the next."""
        graph, sizes = self.graph, self.sizes
        retained_bytes = sum(
            value.size_bytes
            for value, maker in zip(graph.values, graph.producer, strict=True)
            if value.retained and maker < self.begin
        )
        self.changed.update(u for u, maker in enumerate(graph.producer) if maker < self.begin)
        found: dict[int, float] = {}
        for step in range(self.begin, self.end):
            operation = graph.operations[step]
            for u in operation.inputs:
                self.make(u)
            touched = {*operation.inputs, *operation.outputs}
            self.changed |= touched
            for u in self.changed:
                share = 1.0 if u in touched else self.share_after(u, step)
                self.total_bytes += sizes[u] * (share - self.shares.get(u, 0.0))
                self.shares[u] = share
            self.changed = touched
            retained_bytes += sum(graph.values[u].size_bytes for u in operation.outputs if graph.values[u].retained)
            found[step] = self.costs[step].workspace_bytes + retained_bytes + self.total_bytes
        return found

    def share_after(self, value: int, step: int) -> float:
        """Return the live share of a value while a first run does not touch it."""
        readers = self.graph.readers[value]
        following = readers[bisect_right(readers, step) :]
        is_read = bool(following) and following[0] < self.end
        asked = (self.at_end.get(value, 0.0), *(self.left.get(each, 0.0) for each in readers))
        share = 1.0 if is_read else max(asked)
        return max(share - self.left.get(self.graph.producer[value], 0.0), 0.0)

    def make(self, value: int) -> None:
        """Recompute the missing share of a value, as far as the solution allows."""
        stack = [(value, 1.0)]
        while stack:
            u, wanted = stack.pop()
            maker = self.graph.producer[u]
            share = min(wanted - self.there.get(u, 1.0), self.left.get(maker, 0.0))
            if share <= _NOTHING:
                continue
            self.left[maker] -= share
            operation = self.graph.operations[maker]
            for each in operation.outputs:
                if each in self.there:
                    self.there[each] = min(self.there[each] + share, 1.0)
            self.changed.update(operation.inputs, operation.outputs)
            stack.extend((each, share) for each in operation.inputs)
