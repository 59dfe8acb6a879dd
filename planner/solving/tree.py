"""Branch and bound over relaxations: the bound rises with every node, long before a whole solution is found.

The node of the lowest bound is divided next. The choice to divide it by is that which raises the bounds of both sides
most, tried for a few, and remembered for those that were tried before. At each node rows that its solution breaks are
added; they hold for all.

Trials are those of Applegate, Bixby, Chvatal, Cook, "Finding Cuts in the TSP", DIMACS technical report 95-05, 1995,
and memory that of Achterberg, Koch, Martin, "Branching rules revisited", Operations Research Letters 33, 2005.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.solving.branching import Branching, Choice, Kind, Limits
from planner.solving.milp import Answer, Relaxation, may_beat
from planner.solving.step_cut import Model

_TRIED, _TRIED_DEEP, _DEEP = 8, 2, 3
"""How many choices not known yet are tried at a node, and at nodes of this depth."""

_KNOWN = 4
"""How many choices that were tried before are tried again."""

_TRIAL_TURNS = 60
"""Steps of the simplex algorithm that a trial takes at most."""

_LEAST = 1e-5
"""Of the objective; a gain of nothing would hide what the other side gains."""

_MOST = 0.1
"""No gain counts for more than this share of the bound; nothing is known of where there is no solution."""

_ANY = 0.0, math.inf


@dataclass(slots=True)
class Gains:
    """By how much bounds rose where something was decided, for each share of it: downwards, upwards, and how often."""

    known: dict[tuple[Kind, int], tuple[float, float, int]] = field(default_factory=dict)

    def tell(self, choice: Choice, down: float, up: float) -> None:
        """Take what a trial brought."""
        about = choice.question.kind, choice.question.index  # it is alike at all cuts
        before = self.known.get(about, (0.0, 0.0, 0))
        shares = down / choice.share, up / (1.0 - choice.share)
        self.known[about] = before[0] + shares[0], before[1] + shares[1], before[2] + 1

    def expected(self, choice: Choice) -> float | None:
        """Return about what deciding it is worth; None if it was never tried."""
        found = self.known.get((choice.question.kind, choice.question.index))
        if found is None:
            return None
        down, up, times = found
        return worth(down / times * choice.share, up / times * (1.0 - choice.share))


def worth(down: float, up: float) -> float:
    """Return what two gains are worth together."""
    return max(down, _LEAST) * max(up, _LEAST)


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
        gains: Gains,
        solve: Callable[[int | None], Answer],
    ) -> None:
        self.model, self.branching, self.relaxation = model, branching, relaxation
        self.add_broken, self.gains, self.solve = add_broken, gains, solve
        self.open: list[Node] = []
        self.number = 0
        self.current: dict[tuple[int, ...], tuple[float, float]] = {}
        """What sums of columns are limited to."""
        self.places: dict[tuple[int, ...], int] = {}
        """Where the model has the rows of sums that something was decided of."""

    def plant(self, decided: Iterable[Limits], cutoff: float) -> bool:
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

    def divide(self, cutoff: float) -> Node | None:
        """Divide the open node of the lowest bound; return it instead if its solution is whole.

        What cannot cost less than the cutoff is dropped. If an answer without columns says that time is over, all stays
        as it is. Two relaxations for each choice that is tried, and two to four more.
        """
        node = heapq.heappop(self.open)
        choices = list(self.branching.choices(node.columns))
        if not choices:
            heapq.heappush(self.open, node)
            return node
        tried = self._worth_trying(choices, node)
        trials = [self._sides(node.limits, choice) for choice in tried]
        for limits, _ in trials:
            self._place(limits)
        self._solve(node.limits, None)
        basis, num_rows = self.relaxation.basis(), len(self.model.rows)
        best: tuple[float, tuple[Limits, Limits]] | None = None
        for choice, sides in zip(tried, trials, strict=True):
            answers = [self._try(limits, basis) for limits in sides]
            if any(_is_cut_short(answer, _TRIAL_TURNS) for answer in answers):
                heapq.heappush(self.open, node)
                return None
            down, up = (self._gain(node, answer, cutoff) for answer in answers)
            self.gains.tell(choice, down, up)
            if best is None or worth(down, up) > best[0]:
                best = worth(down, up), sides
            if not any(may_beat(math.inf if answer.infeasible else answer.bound, cutoff) for answer in answers):
                break
        assert best is not None
        opened = []
        for limits in best[1]:
            if len(self.model.rows) == num_rows:
                self.relaxation.go_on_from(basis)
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
        self.relaxation.go_on_from(basis)
        return self._solve(limits, _TRIAL_TURNS)

    @staticmethod
    def _gain(node: Node, answer: Answer, cutoff: float) -> float:
        most = min(max(cutoff - node.bound, 0.0), _MOST * node.bound + _LEAST)
        return most if answer.infeasible else min(max(answer.bound - node.bound, 0.0), most)

    def _worth_trying(self, choices: list[Choice], node: Node) -> list[Choice]:
        expected = [(self.gains.expected(choice), choice) for choice in choices]
        known = [(value, choice) for value, choice in expected if value is not None]
        known.sort(key=lambda each: -each[0])
        new = [choice for value, choice in expected if value is None]
        new.sort(key=lambda choice: -choice.weight)
        tried = [choice for _, choice in known[: _KNOWN if new else _TRIED_DEEP]]
        return tried + new[: _TRIED if len(node.limits) < _DEEP else _TRIED_DEEP]

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
            if self.current.get(columns, _ANY) != wanted.get(columns, _ANY):
                self._limit(columns, *wanted.get(columns, _ANY))
        self.current = wanted
        return self.solve(turns)

    def _limit(self, columns: tuple[int, ...], low: float, high: float) -> None:
        if len(columns) == 1:
            self.relaxation.limit_column(columns[0], low, min(high, 1.0))
        else:
            self.relaxation.limit_row(self.places[columns], low, high)

    def _place(self, limits: Limits) -> None:
        """Give the sums of columns that are limited rows."""
        for columns in map(self.branching.columns, limits):
            if len(columns) > 1 and columns not in self.places:
                self.places[columns] = len(self.model.rows)
                self.model.at_least(0.0, *((column, 1.0) for column in columns))


def _is_cut_short(answer: Answer, turns: float = math.inf) -> bool:
    """Say whether time was over before an answer was there, or before so many steps."""
    return answer.columns is None and not answer.infeasible and answer.turns < turns
