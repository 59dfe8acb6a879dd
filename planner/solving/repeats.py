"""Repeated layers: stretches of the base order in which each operation is like the one a period later.

They are found in the sizes alone, whatever modules say. What is good for one layer is good for others of its stretch,
but for those at the ends: so what is made again in one can be copied to them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from planner.ir.problem import Problem

_LEAST = 8
"""Operations of a layer, at least: what is smaller is part of one."""


class Stretch(NamedTuple):
    """Operations from ``first`` up to ``end``, of which each is like the one ``period`` later, if that is one."""

    first: int
    end: int
    period: int


def stretches(problem: Problem) -> list[Stretch]:
    """Return stretches of at least two layers, none of which overlap, the longest first. O(operations squared)."""
    np: Any = import_module("numpy")
    kinds = np.array(_kinds(problem))
    count = len(kinds)
    found: list[Stretch] = []
    for period in range(_LEAST, count // 2 + 1):
        alike = np.flatnonzero(np.diff(kinds[:-period] == kinds[period:], prepend=False, append=False))
        for first, end in zip(alike[::2].tolist(), alike[1::2].tolist(), strict=True):
            if end - first >= period:
                found.append(Stretch(first, end + period, period))
    chosen: list[Stretch] = []
    for stretch in sorted(found, key=lambda each: (each.first - each.end, each.period)):
        if all(stretch.end <= other.first or other.end <= stretch.first for other in chosen):
            chosen.append(stretch)
    return chosen


def _kinds(problem: Problem) -> list[int]:
    """Give operations that do the same, with as many bytes, the same number."""
    values = problem.graph.values
    numbers: dict[Any, int] = {}
    return [
        numbers.setdefault(
            (
                operation.target,
                operation.recomputable,
                operation.state_bytes,
                cost.workspace_bytes,
                tuple(values[u].size_bytes for u in operation.inputs),
                tuple(values[u].size_bytes for u in operation.outputs),
            ),
            len(numbers),
        )
        for operation, cost in zip(problem.graph.operations, problem.costs, strict=True)
    ]


class Repeats:
    """The repeated layers of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._stretch_of = {
            index: stretch for stretch in stretches(problem) for index in range(stretch.first, stretch.end)
        }

    def stretch_of(self, operation: int) -> Stretch | None:
        """Return the stretch that an operation is in, if it is in one."""
        return self._stretch_of.get(operation)

    def made_for(self, operation: int, stretch: Stretch, layers: int) -> int | None:
        """Return what is to a layer of a stretch what an operation is to one so many layers before; None if nothing is.

        Layers of another stretch come in the opposite order: those of the backward go back through the forward.
        """
        own = self._stretch_of.get(operation)
        if own is None:
            return operation
        moved = operation + own.period * (layers if own == stretch else -layers)
        return moved if own.first <= moved < own.end else None
