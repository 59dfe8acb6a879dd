"""Where a relaxed solution of a step-cut programme breaks the budget: the moments at which a cut tells it most.

A relaxation holds shares of values and runs shares of operations again. It is carried out as a whole solution is, all
as late as it may, a share at a time: what is there of each value at each first run follows, and so do bytes. They prove
nothing. They say where the relaxation gets away with most, which a solution that is rounded to a plan does not: that
one breaks the budget wherever shares were rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir.problem import Problem
from planner.solving.step_cut import Cut, Model

_NOTHING = 1e-9


def bytes_between(
    problem: Problem, cuts: Sequence[Cut], model: Model, columns: Sequence[float]
) -> list[dict[int, float]]:
    """Return, for each cut, about what a relaxed solution takes at each first run between it and the next.

    O(operations x values) in all.
    """
    ends = [*(cut.step for cut in cuts[1:]), len(problem.graph.operations)]
    return [
        _Stretch(problem, model, columns, number, cut.latest + 1, end).bytes()
        for number, (cut, end) in enumerate(zip(cuts, ends, strict=True))
    ]


class _Stretch:
    """First runs between a cut and the next, and what runs again among them."""

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

    def bytes(self) -> dict[int, float]:
        """Carry it out."""
        graph, end = self.graph, self.end
        made = [u for u, maker in enumerate(graph.producer) if maker < end and graph.values[u].size_bytes]
        retained = [u for u in made if graph.values[u].retained]
        last_read = {u: max((reader for reader in graph.readers[u] if reader < end), default=-1) for u in made}
        needed = [u for u in made if last_read[u] >= self.begin or self.at_end.get(u) or self.there.get(u)]
        needed = [u for u in needed if not graph.values[u].retained]
        read_again = {u for o in self.left for u in graph.operations[o].inputs}
        found: dict[int, float] = {}
        for step in range(self.begin, end):
            operation = graph.operations[step]
            for u in operation.inputs:
                self.make(u)
            touched = {*operation.inputs, *operation.outputs}
            size_bytes = float(self.costs[step].workspace_bytes)
            size_bytes += sum(graph.values[u].size_bytes for u in retained if graph.producer[u] <= step)
            for u in needed:
                if u in touched:
                    size_bytes += graph.values[u].size_bytes
                elif graph.producer[u] < step:
                    share = 1.0 if last_read[u] > step else self.at_end.get(u, 0.0)
                    if u in read_again:
                        share = max(share, *(self.left.get(reader, 0.0) for reader in graph.readers[u]))
                    share -= self.left.get(graph.producer[u], 0.0)
                    size_bytes += graph.values[u].size_bytes * max(share, 0.0)
            found[step] = size_bytes
        return found

    def make(self, value: int) -> None:
        """Run again what is missing of a value, as far as there is something left to run."""
        stack = [(value, 1.0)]
        while stack:
            u, wanted = stack.pop()
            maker = self.graph.producer[u]
            share = min(wanted - self.there.get(u, 1.0), self.left.get(maker, 0.0))
            if share <= _NOTHING:
                continue
            self.left[maker] -= share
            for each in self.graph.operations[maker].outputs:
                if each in self.there:
                    self.there[each] = min(self.there[each] + share, 1.0)
            stack.extend((each, share) for each in self.graph.operations[maker].inputs)
