"""Other orders of the operations in which a step may need less memory, made by quick rules.

A step is captured in the order in which its program was written, and its backward goes the same way back. That is
seldom far off. But where a program takes several branches a layer at a time, or keeps all features for heads that come
last, much waits that need not: in the forward, and where its values are made again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from planner.ir.graph import TrainingGraph
from planner.ir.order import needed, reordered
from planner.ir.problem import Problem

Order = tuple[int, ...]

_LOWER, _MUCH_LESS = 0.99, 0.95
"""An order is worth a try if it needs less than this share at its peak; or no more there, and so much less on average.
What remains to be made again for it is known only when it is planned for."""


@dataclass(frozen=True, slots=True, order=True)
class Need:
    """What an order needs if whatever the forward makes were made again, for nothing, wherever it is read."""

    peak_bytes: int
    mean_bytes: float
    """In the backward, over time."""


def need(problem: Problem) -> Need:
    """Say what the order of a problem needs at least of a plan that recomputes what it can; O(values + inputs).

    Gradients on their way are there from the run that makes them to the last that reads them, values of the forward
    from the first run of the backward that reads them to the last, what is retained from where it is made.
    """
    graph, costs = problem.graph, problem.costs
    values, turn, count = graph.values, graph.loss_index, len(graph.operations)
    change = [0] * (count + 1)
    own_bytes = [cost.workspace_bytes for cost in costs]
    for u, (value, maker) in enumerate(zip(values, graph.producer, strict=True)):
        begin, end = maker, (graph.readers[u] or (maker,))[-1]
        if value.retained:
            end = count - 1
        elif maker < turn:
            for index in (maker, *(reader for reader in graph.readers[u] if reader <= turn)):
                own_bytes[index] += value.size_bytes
            begin = next((reader for reader in graph.readers[u] if reader > turn), count)
        if begin <= end:
            change[begin] += value.size_bytes
            change[end + 1] -= value.size_bytes
    live = list(accumulate(change))[:count]
    seconds = sum(cost.seconds for cost in costs[turn:]) or 1.0
    return Need(
        peak_bytes=max(map(add, live, own_bytes), default=0),
        mean_bytes=sum(live[index] * costs[index].seconds for index in range(turn, count)) / seconds,
    )


def promising_order(problem: Problem) -> Order | None:
    """Return the order that needs least, if that is worth a try; a pure function of the problem, whatever its budget.

    O(operations x (log operations + reads)).
    """
    own = need(problem)
    found = min(((need(reordered(problem, order)), order) for order in other_orders(problem.graph)), default=None)
    if found is None:
        return None
    least, order = found
    lower = least.peak_bytes < _LOWER * own.peak_bytes
    shorter = least.peak_bytes <= own.peak_bytes and least.mean_bytes < _MUCH_LESS * own.mean_bytes
    return order if lower or shorter else None


def other_orders(graph: TrainingGraph) -> Iterator[Order]:
    """Return orders unlike the graph's own, none twice; none if it is fixed, or has no backward."""
    turn = graph.loss_index
    if graph.runs_after is None or turn >= len(graph.operations):
        return
    rules = _Rules(graph)
    seen = {tuple(range(len(graph.operations)))}
    for order in (
        rules.branch_by_branch(),
        rules.mirrored(),
        rules.releasing_first(),
        rules.smallest_first(),
        rules.smallest_first_backward(),
    ):
        if order not in seen:
            seen.add(order)
            yield order


class _Rules:
    """The rules, and what they have in common."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph, self.turn, self.count = graph, graph.loss_index, len(graph.operations)
        self.needed = needed(graph)
        self.followers: list[list[int]] = [[] for _ in graph.operations]
        for index, earlier in enumerate(self.needed):
            for before in earlier:
                self.followers[before].append(index)

    def branch_by_branch(self) -> Order:
        """Run each forward branch to its end before the next begins, and go back in turn."""
        return self._going_back(self._depth_first())

    def mirrored(self) -> Order:
        """Leave the forward as it is, and go back to its operations one by one, from the last to the first."""
        return self._going_back(list(range(self.turn)))

    def smallest_first(self) -> Order:
        """Run what adds least to what is there, or frees most of it."""
        return self._listed(lambda index, added_bytes: (added_bytes, index))

    def smallest_first_backward(self) -> Order:
        """Do so in the backward alone."""
        return self._listed(lambda index, added_bytes: (added_bytes if index > self.turn else 0, index))

    def releasing_first(self) -> Order:
        """In the backward run what frees memory as soon as it can."""
        return self._listed(lambda index, added_bytes: (min(added_bytes, 0) if index > self.turn else 0, index))

    def _depth_first(self) -> list[int]:
        """Give each operation of the forward its place if what the loss reads is made one after the other."""
        place: dict[int, int] = {}
        for root in sorted(self.graph.producer[u] for u in self.graph.operations[self.turn].inputs):
            stack = [root]
            while stack:
                top = stack[-1]
                missing = next((each for each in sorted(self.needed[top]) if each not in place), None)
                if top in place:
                    stack.pop()
                elif missing is not None:
                    stack.append(missing)
                else:
                    place[stack.pop()] = len(place)
        # What else the forward does, as with its buffers, comes as soon as it can.
        for index in range(self.turn):
            if index not in place:
                place[index] = max((place[before] for before in self.needed[index]), default=0)
        return [place[index] for index in range(self.turn)]

    def _going_back(self, place: Sequence[int]) -> Order:
        """Order the forward by places, and let the backward first read what has the last of them."""
        back = [0] * self.count
        for index in range(self.turn + 1, self.count):
            read = [self.graph.producer[u] for u in self.graph.operations[index].inputs]
            own = [place[maker] for maker in read if maker < self.turn]
            before = [back[maker] for maker in read if maker > self.turn]
            back[index] = max(own) if own else min(before, default=self.turn)
        return self._listed(lambda index, _: (place[index] if index < self.turn else -back[index], index))

    def _listed(self, rank: Callable[[int, int], tuple[int, int]]) -> Order:
        """List operations, of those that can run always the one of the lowest rank, told what it adds to what is there.

        The method is list scheduling; ranks fall, never rise, as the readers of what an operation frees run.
        """
        operations, values = self.graph.operations, self.graph.values
        left = [len(readers) for readers in self.graph.readers]
        waits_for = [len(earlier) for earlier in self.needed]
        sizes = [0 if value.retained else value.size_bytes for value in values]
        born = [
            sum(values[u].size_bytes for u in operation.outputs if left[u] or values[u].retained)
            for operation in operations
        ]

        def ranked(index: int) -> tuple[int, int]:
            freed = sum(sizes[u] for u in dict.fromkeys(operations[index].inputs) if left[u] == 1)
            return rank(index, born[index] - freed)

        ready = [(ranked(index), index) for index in range(self.count) if not waits_for[index]]
        heapq.heapify(ready)
        listed: dict[int, None] = {}
        while ready:
            _, index = heapq.heappop(ready)
            if index in listed:
                continue
            listed[index] = None
            for u in dict.fromkeys(operations[index].inputs):
                left[u] -= 1
                if left[u] == 1:
                    for reader in self.graph.readers[u]:
                        if reader not in listed and not waits_for[reader]:
                            heapq.heappush(ready, (ranked(reader), reader))
            for follower in self.followers[index]:
                waits_for[follower] -= 1
                if not waits_for[follower]:
                    heapq.heappush(ready, (ranked(follower), follower))
        return tuple(listed)
