"""What to decide next in a step-cut programme: by when something has run again how often, or whether a value is held.

Whether an operation runs again between two certain cuts is a poor question: if not there, it runs between the next two.
Whether it has run again by a cut at all changes much either way, and so does whether a large value is held at one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from planner.ir.problem import Problem
from planner.solving.dominated_values import passing_values
from planner.solving.step_cut import Cut, Model

_WHOLE = 1e-5
"""So near to a whole number is one."""

_SMALL = 3e-3
"""Values of less than this share of the budget are not asked for: what runs again decides them."""


class Kind(Enum):
    """What is asked."""

    RUNS = "how often an operation runs again between cuts before a moment"
    HELD = "whether a value is held at a cut"
    BEGINS = "whether an operation's being run again is the moment of a cut"


@dataclass(frozen=True, slots=True)
class Question:
    """What has a whole number for an answer in every plan, whatever other cuts there are."""

    kind: Kind
    index: int
    """Of the operation, or the value."""
    cut: Cut | None
    """The cut that is the moment; None stands for the end of the step."""
    since: Cut | None = None
    """The cut from which on runs count."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A question that a solution leaves open."""

    question: Question
    level: float
    """Its answer there."""
    weight: float
    """About how much there is in it: bytes, and how far the answer is from whole."""

    @property
    def lower(self) -> int:
        """The whole number below."""
        return math.floor(self.level)

    @property
    def share(self) -> float:
        """How far the answer is above that."""
        return self.level - self.lower


Limits = dict[Question, tuple[float, float]]
"""What answers are at least and at most."""


class Branching:
    """The questions that there are in a model of some cuts."""

    def __init__(self, problem: Problem, cuts: Sequence[Cut], model: Model) -> None:
        graph = problem.graph
        self.passing = passing_values(graph)
        """What may have passed where there were fewer cuts."""
        self.cuts, self.model = cuts, model
        self.ends: list[Cut | None] = [*cuts[1:], None]
        self.numbers = {cut: number for number, cut in enumerate(cuts)}
        self.sizes = [value.size_bytes for value in graph.values]
        self.outputs_bytes = [max((self.sizes[u] for u in o.outputs), default=0) for o in graph.operations]
        self.columns_of: dict[int, list[tuple[int, int]]] = {}
        """Of each operation: after which cuts it may run again, and the columns of that."""
        for number, again in enumerate(model.run_again):
            for operation, column in again.items():
                self.columns_of.setdefault(operation, []).append((number, column))
        self.runs = list({tuple(columns): operation for operation, columns in self.columns_of.items()}.values())
        """What runs again; of what runs together, one."""
        least_bytes = _SMALL * problem.budget_bytes
        self.large = [
            (number, u, column)
            for number, held in enumerate(model.held)
            for u, column in held.items()
            if column != model.nothing and self.sizes[u] > least_bytes
        ]

    def columns(self, question: Question) -> tuple[int, ...]:
        """Return the columns whose sum is the answer; none if the model does not know it."""
        number = len(self.ends) if question.cut is None else self.numbers.get(question.cut, -1)
        if question.kind is Kind.RUNS:
            first = len(self.ends) if question.since is None else self.numbers.get(question.since, len(self.ends))
            return tuple(column for at, column in self.columns_of.get(question.index, ()) if first <= at < number)
        if number < 0:
            return ()
        those = self.model.held[number] if question.kind is Kind.HELD else self.model.begins[number]
        return (those[question.index],) if question.index in those else ()

    def known(self, limits: Limits) -> Limits:
        """Return those limits, found with fewer cuts, that every plan that kept them there keeps here.

        Between more cuts an operation may run again more often: that it does, or never does, stays true, that it does
        so no more than once need not. Where something is held in place of what it makes or reads, that depends on the
        cuts; so does the moment of a cut between two steps.
        """
        runs = {operation for each in self.passing for operation in (each.maker, each.reader)}
        values = {u for each in self.passing if each not in self.model.passing for u in each.results}
        found: Limits = {}
        for question, (low, high) in limits.items():
            if any(cut is not None and cut.again for cut in (question.cut, question.since)):
                continue
            if question.index in (runs if question.kind is Kind.RUNS else values):
                continue
            if question.kind is Kind.RUNS and high > 0.0:
                high = math.inf
            if self.columns(question) and (low > 0.0 or high < math.inf):
                found[question] = low, high
        return found

    def choices(self, columns: Sequence[float]) -> Iterator[Choice]:
        """Return the choices that a solution leaves open; if there are none, what runs again in it is whole."""
        for operation in self.runs:
            found = _undecided(self.columns_of[operation], columns)
            if found is not None:
                number, level, weight = found
                first = self.columns_of[operation][0][0]
                question = Question(Kind.RUNS, operation, self.ends[number], self.cuts[first])
                yield Choice(question, level, weight * (1 + self.outputs_bytes[operation]))
        for number, u, column in self.large:
            if not _is_whole(level := columns[column]):
                question = Question(Kind.HELD, u, self.cuts[number])
                yield Choice(question, level, _distance(level) * self.sizes[u])
        for number, begins in enumerate(self.model.begins):
            for operation, column in begins.items():
                if not _is_whole(level := columns[column]):
                    yield Choice(Question(Kind.BEGINS, operation, self.cuts[number]), level, _distance(level))


def _undecided(those: Sequence[tuple[int, int]], columns: Sequence[float]) -> tuple[int, float, float] | None:
    """Return after which cut to stop summing up, the last if that can be; the sum; and how undecided that is."""
    level, last = 0.0, those[-1][0]
    best: tuple[int, float, float] | None = None
    for number, column in those:
        if columns[column] > 0.0:
            level += columns[column]
            if not _is_whole(level) and (best is None or _distance(level) > best[2]):
                best = number, level, _distance(level)
    return best if _is_whole(level) else (last, level, 2 * _distance(level))


def _distance(level: float) -> float:
    return min(level - math.floor(level), math.ceil(level) - level)


def _is_whole(level: float) -> bool:
    return _distance(level) < _WHOLE
