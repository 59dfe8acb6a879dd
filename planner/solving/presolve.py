"""The problem that programmes are written for: the planning problem with fewer values, and the same plans.

What one operation makes and the same others read is there at the same moments in every plan, so one value stands for
all of it. And values of a few bytes, a batch norm's means in a network whose activations are images, make a
programme much larger and move its optimum by nothing to speak of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.ir.problem import Problem
from planner.solving.dominated_values import may_go

_SMALL_TOGETHER = 5e-4
"""Of the budget: what the values that are left out take, if all of them are there."""


def merged(problem: Problem) -> Problem:
    """Return the problem with one value for all that an operation makes for the same readers; the others take nothing.

    Each schedule takes as many bytes at each moment as before. O(values + reads).
    """
    graph = problem.graph
    sizes = [value.size_bytes for value in graph.values]
    first: dict[tuple[int, tuple[int, ...]], int] = {}
    for u in _that_may_go(problem):
        one = first.setdefault((graph.producer[u], graph.readers[u]), u)
        if one != u:
            sizes[one] += sizes[u]
            sizes[u] = 0
    return _with_sizes(problem, sizes)


def without_small(problem: Problem) -> Problem:
    """Return the problem with the smallest values taking nothing: no schedule takes more bytes, so bounds hold.

    O(values x log values).
    """
    sizes = [value.size_bytes for value in problem.graph.values]
    left_bytes = _SMALL_TOGETHER * problem.budget_bytes
    for u in sorted(_that_may_go(problem), key=sizes.__getitem__):
        left_bytes -= sizes[u]
        if left_bytes < 0:
            break
        sizes[u] = 0
    return _with_sizes(problem, sizes)


def _that_may_go(problem: Problem) -> list[int]:
    graph = problem.graph
    return [u for u in range(len(graph.values)) if may_go(graph, u)]


def _with_sizes(problem: Problem, sizes: Sequence[int]) -> Problem:
    values = (
        value if value.size_bytes == size_bytes else replace(value, size_bytes=size_bytes)
        for value, size_bytes in zip(problem.graph.values, sizes, strict=True)
    )
    return replace(problem, graph=replace(problem.graph, values=tuple(values)))
