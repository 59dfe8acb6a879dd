"""Branch and bound over relaxations of a step-cut programme: a bound that rises with every node.

What to branch on: how often an operation has been recomputed by a cut, or whether a value is held at one. Whether an
operation is recomputed between two certain cuts is a poor question: if not there, it is between the next two. Whether
it has been by a cut at all changes much either way, and so does whether a large value is held.

The node of the lowest bound is branched on next, on the choice that raises the bounds of both sides most. That is tried
for the few in which there is most (strong branching: Applegate, Bixby, Chvatal, Cook, "Finding Cuts in the TSP", DIMACS
technical report 95-05, 1995). At each node the rows that its solution breaks are added; they hold for all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from planner.ir.problem import Problem
from planner.solving.milp import Answer, Relaxation, may_beat
from planner.solving.presolve import dominated_values
from planner.solving.step_cut import Cut, Model

_WHOLE = 1e-5
"""So near to a whole number is one."""

_SMALL = 3e-3
"""Values of less than this share of the budget are not asked for: what runs again decides them."""

_TRIED, _TRIED_DEEP, _DEEP = 8, 2, 3
"""How many choices are tried at a node, and at nodes of this depth."""

_TRIAL_TURNS = 60
"""Steps of the simplex algorithm that a trial takes at most."""

_LEAST = 1e-5
"""Of the objective; a gain of nothing would hide what the other side gains."""

_MOST = 0.1
"""No gain counts for more than this share of the bound; nothing is known of where there is no solution."""

_ANY = 0.0, math.inf


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


Limits = dict[Question, tuple[float, float]]
"""What answers are at least and at most."""


class Branching:
    """The questions that there are in a model of some cuts."""

    def __init__(self, problem: Problem, cuts: Sequence[Cut], model: Model) -> None:
        graph = problem.graph
        self.dominated = dominated_values(graph)
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
        runs = {operation for each in self.dominated for operation in (each.maker, each.reader)}
        values = {u for each in self.dominated if each not in self.model.dominated for u in each.results}
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
        for operation, those in self.columns_of.items():
            found = _undecided(those, columns)
            if found is not None:
                number, level, weight = found
                first = those[0][0]
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


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """What is decided, and the optimum of that."""

    bound: float
    number: int
    limits: Limits = field(compare=False)
    columns: list[float] = field(compare=False)


class Tree:
    """A search that can be asked after each node how it stands.

    ``solve`` solves the relaxation, in no more than so many steps if that is given; ``add_broken`` adds rows to the
    model that a solution breaks, and says how many. Bounds and cutoffs are in the unit of the model's costs.
    """

    def __init__(
        self,
        model: Model,
        branching: Branching,
        relaxation: Relaxation,
        add_broken: Callable[[Sequence[float]], int],
        solve: Callable[[int | None], Answer],
    ) -> None:
        self.model, self.branching, self.relaxation = model, branching, relaxation
        self.add_broken, self.solve = add_broken, solve
        self.open: list[Node] = []
        self.number = 0
        self.current: dict[tuple[int, ...], tuple[float, float]] = {}
        """What sums of columns are limited to."""
        self.places: dict[tuple[int, ...], int] = {}
        """Where the model has the rows of sums that something was decided of."""

    def open_nodes(self, decided: Iterable[Limits], cutoff: float) -> bool:
        """Open nodes that stand for all solutions together; False: time was over before that."""
        for limits in decided:
            self._place(limits)
            answer = self._solve(limits, None)
            if answer.columns is not None and may_beat(answer.bound, cutoff):
                self._open(answer.bound, limits, answer.columns)
            elif _is_cut_short(answer):
                return False
        return True

    def bound(self, cutoff: float) -> float:
        """Return what no solution costs less than, if none costs less than the cutoff where nothing is open."""
        return self.open[0].bound if self.open and may_beat(self.open[0].bound, cutoff) else cutoff

    def branch(self, cutoff: float) -> Node | None:
        """Branch on the open node of the lowest bound; return it instead if its solution is integral.

        What cannot cost less than the cutoff is dropped. If an answer without columns says that time is over, all stays
        as it is. Two relaxations for each choice that is tried, and two to four more.
        """
        node = heapq.heappop(self.open)
        most = _TRIED if len(node.limits) < _DEEP else _TRIED_DEEP
        tried = sorted(self.branching.choices(node.columns), key=lambda choice: -choice.weight)[:most]
        if not tried:
            heapq.heappush(self.open, node)
            return node
        trials = [self._sides(node.limits, choice) for choice in tried]
        for limits, _ in trials:
            self._place(limits)
        self._solve(node.limits, None)
        basis, num_rows = self.relaxation.basis(), len(self.model.rows)
        best: tuple[float, tuple[Limits, Limits]] | None = None
        for sides in trials:
            answers = [self._try(limits, basis) for limits in sides]
            if any(_is_cut_short(answer, _TRIAL_TURNS) for answer in answers):
                heapq.heappush(self.open, node)
                return None
            down, up = (self._gain(node, answer, cutoff) for answer in answers)
            worth = max(down, _LEAST) * max(up, _LEAST)
            if best is None or worth > best[0]:
                best = worth, sides
            if not any(may_beat(math.inf if answer.infeasible else answer.bound, cutoff) for answer in answers):
                break
        assert best is not None
        opened = []
        for limits in best[1]:
            if len(self.model.rows) == num_rows:
                self.relaxation.restart_from(basis)
            answer = self._solve(limits, None)
            if answer.columns is not None and may_beat(answer.bound, cutoff) and self.add_broken(answer.columns):
                better = self._solve(limits, None)
                answer = answer if _is_cut_short(better) else better
            if answer.columns is not None and may_beat(answer.bound, cutoff):
                opened.append((max(answer.bound, node.bound), limits, answer.columns))
            elif _is_cut_short(answer):
                heapq.heappush(self.open, node)
                return None
        for each in opened:
            self._open(*each)
        return None

    def _open(self, bound: float, limits: Limits, columns: list[float]) -> None:
        self.number += 1
        heapq.heappush(self.open, Node(bound, self.number, limits, columns))

    def _try(self, limits: Limits, basis: Any) -> Answer:
        self.relaxation.restart_from(basis)
        return self._solve(limits, _TRIAL_TURNS)

    @staticmethod
    def _gain(node: Node, answer: Answer, cutoff: float) -> float:
        most = min(max(cutoff - node.bound, 0.0), _MOST * node.bound + _LEAST)
        return most if answer.infeasible else min(max(answer.bound - node.bound, 0.0), most)

    @staticmethod
    def _sides(limits: Limits, choice: Choice) -> tuple[Limits, Limits]:
        low, high = limits.get(choice.question, _ANY)
        down = {**limits, choice.question: (low, float(choice.lower))}
        up = {**limits, choice.question: (choice.lower + 1.0, high)}
        return down, up

    def _solve(self, limits: Limits, turns: int | None) -> Answer:
        wanted: dict[tuple[int, ...], tuple[float, float]] = {}
        for question, (low, high) in limits.items():
            columns = self.branching.columns(question)
            least, most = wanted.get(columns, _ANY)  # another question may be about the same columns
            wanted[columns] = max(low, least), min(high, most)
        for columns in {**self.current, **wanted}:
            low, high = wanted.get(columns, _ANY)
            if self.current.get(columns, _ANY) == (low, high):
                continue
            if len(columns) == 1:
                self.relaxation.limit_column(columns[0], low, min(high, 1.0))
            else:
                self.relaxation.limit_row(self.places[columns], low, high)
        self.current = wanted
        return self.solve(turns)

    def _place(self, limits: Limits) -> None:
        """Make limited sums of columns rows of the model."""
        for columns in map(self.branching.columns, limits):
            if len(columns) > 1 and columns not in self.places:
                self.places[columns] = len(self.model.rows)
                self.model.at_least(0.0, *((column, 1.0) for column in columns))


def _is_cut_short(answer: Answer, turns: float = math.inf) -> bool:
    """Say whether time was over before an answer was there, or before so many steps."""
    return answer.columns is None and not answer.infeasible and answer.turns < turns
