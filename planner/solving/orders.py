"""Another order of the operations in which a step may need less memory: branch by branch, and back in turn.

A step is captured in the order in which its program was written, and its backward goes the same way back. That is
seldom far off. But where a program takes several branches a layer at a time, or keeps all features for heads that come
last, much waits that need not: in the forward, and where its values are made again.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
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
    """Live bytes of an order if every forward value were recomputed for free at each read."""

    peak_bytes: int
    mean_bytes: float
    """In the backward, over time."""


def need(problem: Problem) -> Need:
    """Bound the bytes that any plan in the problem's order needs; O(values + inputs).

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
    """Return the order branch by branch if it is promising; the budget does not matter.

    O(operations x log operations + reads).
    """
    order = branch_by_branch(problem.graph)
    if order is None:
        return None
    own, other = need(problem), need(reordered(problem, order))
    lower = other.peak_bytes < _LOWER * own.peak_bytes
    shorter = other.peak_bytes <= own.peak_bytes and other.mean_bytes < _MUCH_LESS * own.mean_bytes
    return order if lower or shorter else None


def branch_by_branch(graph: TrainingGraph) -> Order | None:
    """Run each forward branch to its end before the next, and reverse that order in the backward.

    None if that is the graph's own order, or its order is fixed, or it has no backward.
    """
    turn, count = graph.loss_index, len(graph.operations)
    if graph.runs_after is None or turn >= count:
        return None
    earlier = needed(graph)
    place = _depth_first(graph, earlier)
    back = [0] * count
    for index in range(turn + 1, count):
        read = [graph.producer[u] for u in graph.operations[index].inputs]
        own = [place[maker] for maker in read if maker < turn]
        before = [back[maker] for maker in read if maker > turn]
        back[index] = max(own) if own else min(before, default=turn)
    order = _listed(earlier, [place[index] if index < turn else -back[index] for index in range(count)])
    return None if order == tuple(range(count)) else order


def _depth_first(graph: TrainingGraph, earlier: Sequence[set[int]]) -> list[int]:
    """Return the position of each forward operation in a depth-first order from the loss's inputs."""
    place: dict[int, int] = {}
    for root in sorted(graph.producer[u] for u in graph.operations[graph.loss_index].inputs):
        stack = [root]
        while stack:
            top = stack[-1]
            missing = next((each for each in sorted(earlier[top]) if each not in place), None)
            if top in place:
                stack.pop()
            elif missing is not None:
                stack.append(missing)
            else:
                place[stack.pop()] = len(place)
    # What else the forward does, as with its buffers, comes as soon as it can.
    for index in range(graph.loss_index):
        if index not in place:
            place[index] = max((place[before] for before in earlier[index]), default=0)
    return [place[index] for index in range(graph.loss_index)]


def _listed(earlier: Sequence[set[int]], rank: Sequence[int]) -> Order:
    """Topological order that always runs the ready operation of the lowest rank."""
    sorter = TopologicalSorter(dict(enumerate(earlier)))
    sorter.prepare()
    ready: list[tuple[int, int]] = []
    listed: list[int] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, (rank[index], index))
        listed.append(heapq.heappop(ready)[1])
        sorter.done(listed[-1])
    return tuple(listed)
