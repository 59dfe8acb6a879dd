"""Relaxations of some cuts, with the rows that a kind of row adds, held to the cheapest plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from planner.ir.problem import Problem
from planner.solving.milp import Relaxation, minimise
from planner.solving.step_cut import Cut, Model, build
from tests.oracle import cheapest, random_graph


class Rows(Protocol):
    """Rows of a kind for a model: those that a solution breaks, and what tells those that hold an optimum up."""

    def add_broken(self, columns: Sequence[float]) -> int: ...

    def binding(self, prices: Sequence[float]) -> list[Any]: ...


RowsOf = Callable[[Problem, list[Cut], Model, list[Any]], Rows]
"""Makes the rows for a model of some cuts, with those that are known to begin with."""


def bounds(problem: Problem, cuts: list[Cut], rows_of: RowsOf, known: list[Any]) -> tuple[float, float, list[Any]]:
    """Return what the relaxation of some cuts proves without and with broken rows added, and those that matter."""
    model = build(problem, cuts)
    assert model is not None
    scale = max(cost.seconds for cost in problem.costs)
    without = minimise(model, relax=True).bound
    rows = rows_of(problem, cuts, model, known)
    relaxation = Relaxation(model)
    while True:
        found = relaxation.solve()
        assert found.columns is not None
        prices = relaxation.prices()
        broken = rows.add_broken(found.columns)
        assert all(len({column for column, _ in terms}) == len(terms) for terms, _ in model.rows)
        if not broken:
            return without * scale, found.bound * scale, rows.binding(prices)


def hold_to_the_cheapest_plan(seed: int, rows_of: RowsOf, steps_in_turn: Sequence[Sequence[int]]) -> None:
    """Hold the bounds of ever more cuts of a random graph to its cheapest plan, rows that matter kept."""
    graph, costs = random_graph(seed, operations=9, plain=seed % 2 == 0)
    whole = Problem(graph=graph, costs=costs, budget_bytes=0)
    problem = Problem(graph=graph, costs=costs, budget_bytes=int((0.6 + 0.1 * (seed % 4)) * whole.baseline.peak_bytes))
    best = cheapest(problem)
    if best is None:
        return
    known: list[Any] = []
    for steps in steps_in_turn:
        without, bound, known = bounds(problem, [Cut(step) for step in steps], rows_of, known)
        assert without - 1e-9 <= bound <= best[0] + 1e-6
