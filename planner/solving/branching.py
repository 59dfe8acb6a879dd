"""What to decide next in a step-cut programme: by when something has run again how often, or whether a value is held.

Whether an operation runs again between two certain cuts is a poor question: if not there, it runs between the next two.
Whether it has run again by a cut at all changes much either way, and so does whether a large value is held at one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.ir.problem import Problem
from planner.solving.step_cut import Model

_WHOLE = 1e-5
"""So near to a whole number is one."""

_SMALL = 3e-3
"""Values of less than this share of the budget are not asked for: what runs again decides them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A sum of columns that is whole in every plan, and is not in a solution."""

    columns: tuple[int, ...]
    level: float
    """What the sum is."""
    weight: float
    """About how much there is in it: bytes, and how far the sum is from whole."""
    about: tuple[str, int]
    """The operation or value, at whatever cut: what deciding it brings is alike at all of them."""

    @property
    def lower(self) -> int:
        """The whole number below."""
        return math.floor(self.level)

    @property
    def share(self) -> float:
        """How far the sum is above that."""
        return self.level - self.lower


class Branching:
    """The choices in a model."""

    def __init__(self, problem: Problem, model: Model) -> None:
        graph = problem.graph
        sizes = [value.size_bytes for value in graph.values]
        columns_of: dict[int, list[int]] = {}
        for again in model.run_again:
            for operation, column in again.items():
                columns_of.setdefault(operation, []).append(column)
        one_of = {tuple(columns): operation for operation, columns in columns_of.items()}
        self.runs = [
            (operation, columns, max((sizes[u] for u in graph.operations[operation].outputs), default=0))
            for columns, operation in one_of.items()
        ]
        """What runs again, each with its columns in order of time; of what runs together, one."""
        least_bytes = _SMALL * problem.budget_bytes
        self.held = [
            (u, column, sizes[u])
            for held in model.held
            for u, column in held.items()
            if column != model.nothing and sizes[u] > least_bytes
        ]
        self.begins = [each for begins in model.begins for each in begins.items()]

    def choices(self, columns: Sequence[float]) -> Iterator[Choice]:
        """Return the choices that a solution leaves open; if there are none, what runs again in it is whole."""
        for operation, those, size_bytes in self.runs:
            found = _undecided(those, columns)
            if found is not None:
                number, level, weight = found
                yield Choice(those[:number], level, weight * (1 + size_bytes), ("run", operation))
        for value, column, size_bytes in self.held:
            if not _is_whole(columns[column]):
                yield Choice((column,), columns[column], _distance(columns[column]) * size_bytes, ("hold", value))
        for operation, column in self.begins:
            if not _is_whole(columns[column]):
                yield Choice((column,), columns[column], _distance(columns[column]), ("begin", operation))


def _undecided(those: Sequence[int], columns: Sequence[float]) -> tuple[int, float, float] | None:
    """Return how many of some columns to sum up, their sum, and how undecided that is: all of them if that can be."""
    level = 0.0
    best: tuple[int, float, float] | None = None
    for number, column in enumerate(those, 1):
        if columns[column] > 0.0:
            level += columns[column]
            if not _is_whole(level) and (best is None or _distance(level) > best[2]):
                best = number, level, _distance(level)
    return best if _is_whole(level) else (len(those), level, 2 * _distance(level))


def _distance(level: float) -> float:
    return min(level - math.floor(level), math.ceil(level) - level)


def _is_whole(level: float) -> bool:
    return _distance(level) < _WHOLE
