"""A lower bound on the peak of any plan in a step's order, recompute included.

While an operation first runs, what it reads is there. One of these values was born last, in a run of its maker: while
that ran, the others were there already, beside what the maker reads and makes. The same holds of what was there then,
and so on, back to nothing. A plan chooses which value is born last each time; the bound is the least that its highest
moment can be, whatever it chooses.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from planner.ir.graph import OperationCost, TrainingGraph

_FOLLOWED, _STEPS = 12, 1500
"""Operations whose inputs are followed back, and choices that are followed for each: always the same work."""

_SMALL = 1e-3
"""Values of less than this share of what one operation needs are left out where births are followed."""

Live = frozenset[int]


def proven_by_births(
    graph: TrainingGraph, costs: Sequence[OperationCost], first_run_bytes: Sequence[int]
) -> tuple[int, int]:
    """Return a lower bound on the peak of any plan and the operation that binds; O(operations + reads) and some work.

    ``first_run_bytes`` is what must be there while each operation first runs, whatever a plan does.
    """
    least_bytes = _SMALL * max(first_run_bytes, default=0)
    best = max(((size_bytes, -index) for index, size_bytes in enumerate(first_run_bytes)), default=(0, 0))
    promising: list[tuple[int, int]] = []
    proof = _Births(graph, costs, least_bytes)
    for index, size_bytes in enumerate(first_run_bytes):
        proof.before(index)
        promising.append((proof.least_peak(size_bytes, steps=1), -index))
    promising.sort(reverse=True)
    best = max([best, *promising[:1]])
    for _, negative in promising[:_FOLLOWED]:
        proof.before(-negative)
        # What is lower than the best does not matter: all of that is as good as the highest of it.
        followed_bytes = proof.least_peak(max(first_run_bytes[-negative], best[0] - 1), steps=_STEPS)
        best = max(best, (followed_bytes, negative))
    return best[0], -best[1]


class _Births:
    """Follows births back from the first run of an operation; every moment is then before that."""

    def __init__(self, graph: TrainingGraph, costs: Sequence[OperationCost], least_bytes: float) -> None:
        self.graph, self.costs, self.least_bytes = graph, costs, least_bytes
        self.sizes = [value.size_bytes for value in graph.values]
        self.last_reader = [readers[-1] if readers else -1 for readers in graph.readers]
        self.followed = [self._followed(operation.inputs) for operation in graph.operations]
        made = [sum(self.sizes[u] for u in o.outputs if graph.values[u].retained) for o in graph.operations]
        self.retained_bytes = list(accumulate(made))
        """Up to and with each operation."""
        self.irreplaceable = [
            u
            for u, maker in enumerate(graph.producer)
            if self.sizes[u] > least_bytes and not graph.values[u].retained and not graph.operations[maker].recomputable
        ]
        """By their makers."""
        self.irreplaceable.sort(key=graph.producer.__getitem__)
        self.touched = [frozenset((*operation.inputs, *operation.outputs)) for operation in graph.operations]
        self.index = 0
        self.standing: list[int] = []
        self.beside_bytes = [0 if value.retained else value.size_bytes for value in graph.values]
        """What each value takes beside those that are retained, and those that stand."""
        self.makers: list[int] = []
        self.standing_bytes = [0]

    def before(self, index: int) -> None:
        """Begin with an operation: what no plan makes again, and a later one reads, stands from its first run on."""
        self.index = index
        for u in self.standing:
            self.beside_bytes[u] = self.sizes[u]
        self.standing = [u for u in self.irreplaceable if self.last_reader[u] > index]
        for u in self.standing:
            self.beside_bytes[u] = 0
        self.makers = [self.graph.producer[u] for u in self.standing]
        self.standing_bytes = [0, *accumulate(self.sizes[u] for u in self.standing)]

    def least_peak(self, first_run_bytes: int, steps: int) -> int:
        """Return the least that is there at most, and no less than given; at most so many choices are followed.

        The lowest so far come first; of those that are as low, the ones that are nearest to nothing.
        """
        start = self.followed[self.index]
        queue: list[tuple[int, int, int, Live]] = [(first_run_bytes, len(start), 0, start)]
        seen = {start: first_run_bytes}
        number = 0
        while True:
            peak, _, _, live = heapq.heappop(queue)
            if peak > seen[live]:
                continue
            if not live or not steps:
                return peak
            steps -= 1
            for size_bytes, earlier in self._births(live):
                highest = max(peak, size_bytes)
                if highest < seen.get(earlier, highest + 1):
                    seen[earlier] = highest
                    number += 1
                    heapq.heappush(queue, (highest, len(earlier), number, earlier))

    def _births(self, live: Live) -> Iterator[tuple[int, Live]]:
        """Return, for each run that may have been the last to make some of this, what was there in it and before it.

        By then all of this had been made once, and so had all that came before the last of its makers.
        """
        makers = {self.graph.producer[u] for u in live}
        ran = max(makers)
        standing_bytes = self.retained_bytes[ran] + self.standing_bytes[bisect_right(self.makers, ran)]
        size_of = self.beside_bytes.__getitem__
        live_bytes = standing_bytes + sum(map(size_of, live))
        for maker in makers:
            more_bytes = sum(map(size_of, self.touched[maker] - live)) + self.costs[maker].workspace_bytes
            earlier = live.difference(self.graph.operations[maker].outputs) | self.followed[maker]
            yield live_bytes + more_bytes, earlier

    def _followed(self, values: Sequence[int]) -> Live:
        return frozenset(u for u in values if self.sizes[u] > self.least_bytes)
