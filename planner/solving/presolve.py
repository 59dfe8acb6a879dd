"""Reductions before a programme is written: fewer values, and the same cheapest plans.

Merged values: what one operation makes and the same operations read is live at the same moments in every plan, so one
value stands for all of it. Small values: a batch norm's means, in a network whose activations are images, make a
programme much larger and move its optimum by nothing to speak of; without them it still bounds every plan.

Dominated values: a value that one operation alone reads, which reads nothing else that may be dropped, is worth no more
than that operation's results. Where a plan holds the value, let it make the results at once and hold them: they take no
more bytes, and nothing runs more often. So programmes need not ask at which cuts such values are held.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from planner.ir.graph import TrainingGraph
from planner.ir.problem import Problem

_SMALL_TOGETHER = 5e-4
"""Of the budget: what the values that are left out take, if all of them are there."""


def merged(problem: Problem) -> Problem:
    """Merge an operation's outputs that have the same readers into one value.

    Each schedule takes as many bytes at each moment as before. O(values + reads).
    """
    graph = problem.graph
    sizes = [value.size_bytes for value in graph.values]
    first: dict[tuple[int, tuple[int, ...]], int] = {}
    for u in _droppable(graph):
        one = first.setdefault((graph.producer[u], graph.readers[u]), u)
        if one != u:
            sizes[one] += sizes[u]
            sizes[u] = 0
    return replace(problem, graph=graph.with_sizes(sizes))


def without_small(problem: Problem) -> Problem:
    """Ignore the smallest values' bytes: no schedule needs more, so bounds stay valid.

    O(values x log values).
    """
    graph = problem.graph
    sizes = [value.size_bytes for value in graph.values]
    left_bytes = _SMALL_TOGETHER * problem.budget_bytes
    for u in sorted(_droppable(graph), key=sizes.__getitem__):
        left_bytes -= sizes[u]
        if left_bytes < 0:
            break
        sizes[u] = 0
    return replace(problem, graph=graph.with_sizes(sizes))


def _droppable(graph: TrainingGraph) -> list[int]:
    return [u for u in range(len(graph.values)) if can_be_dropped(graph, u)]


@dataclass(frozen=True, slots=True)
class DominatedValue:
    """A value that some cheapest plan never holds after the first run of its reader."""

    value: int
    maker: int
    reader: int
    results: tuple[int, ...]
    """What is held in its place."""


def dominated_values(graph: TrainingGraph, apart: Collection[int] = ()) -> list[DominatedValue]:
    """Return the dominated values by their producers.

    The results may then be made earlier than they were: other moments than first runs of the base order, and those at
    which operations ``apart`` run again, may take more. O(operations + reads).
    """
    return [each for value in range(len(graph.values)) if (each := _dominated(graph, value, apart)) is not None]


def _dominated(graph: TrainingGraph, value: int, apart: Collection[int]) -> DominatedValue | None:
    operations, readers, maker = graph.operations, graph.readers[value], graph.producer[value]
    if len(readers) != 1 or not can_be_dropped(graph, value):
        return None
    runs = operations[maker], operations[readers[0]]
    if any(not run.recomputable or run.state_bytes for run in runs) or maker in apart or readers[0] in apart:
        return None
    if any(u != value and can_be_dropped(graph, u) for u in runs[1].inputs):
        return None
    results = [u for u in runs[1].outputs if can_be_dropped(graph, u)]
    if sum(graph.values[u].size_bytes for u in results) > graph.values[value].size_bytes:
        return None
    return DominatedValue(value, maker, readers[0], tuple(results))


def can_be_dropped(graph: TrainingGraph, value: int) -> bool:
    """Whether a value has bytes that a plan may free: it is read later and not retained."""
    return bool(graph.values[value].size_bytes and graph.readers[value]) and not graph.values[value].retained
