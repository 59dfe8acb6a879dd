"""Rows over ways back: no whole plan breaks them, and with them relaxations of several cuts come nearer to plans."""

from __future__ import annotations

import pytest

from planner.ir.problem import Problem
from planner.solving.milp import Library
from planner.solving.path_rows import PathRows, Way
from planner.solving.step_cut import Cut, build
from tests.oracle import cheapest, random_graph, resnet_like

LIBRARY = Library(print)


def _bounds(problem: Problem, cuts: list[Cut], known: list[Way]) -> tuple[float, float, list[Way]]:
    """Return what the relaxation of some cuts proves without and with broken rows added, and those that matter."""
    model = build(problem, cuts)
    assert model is not None
    without = LIBRARY.minimise(model, relax=True).bound
    paths = PathRows(problem, cuts, model, known)
    relaxation = LIBRARY.relaxation(model)
    while True:
        found = relaxation.solve()
        assert found.columns is not None
        broken = paths.broken(found.columns)
        assert all(len({column for column, _ in terms}) == len(terms) for terms, _ in model.rows)
        if not broken:
            scale = max(cost.seconds for cost in problem.costs)
            return without * scale, found.bound * scale, paths.tight(found.columns)
        relaxation.add(broken)


@pytest.mark.parametrize("seed", range(40))
def test_no_bound_with_them_is_above_the_cheapest_plan(seed: int) -> None:
    graph, costs = random_graph(seed, operations=9, plain=seed % 2 == 0)
    whole = Problem(graph=graph, costs=costs, budget_bytes=0)
    problem = Problem(graph=graph, costs=costs, budget_bytes=int((0.6 + 0.1 * (seed % 4)) * whole.baseline.peak_bytes))
    best = cheapest(problem)
    if best is None:
        return
    ways: list[Way] = []
    for steps in ((4, 6), (2, 4, 6, 8), (2, 3, 4, 5, 6, 7, 8)):
        without, bound, ways = _bounds(problem, [Cut(step) for step in steps], ways)
        assert without - 1e-9 <= bound <= best[0] + 1e-6


def test_between_many_cuts_a_relaxation_no_longer_makes_values_of_halves() -> None:
    graph, costs = resnet_like(12)
    whole = Problem(graph=graph, costs=costs, budget_bytes=0)
    problem = Problem(graph=graph, costs=costs, budget_bytes=int(0.3 * whole.baseline.peak_bytes))
    turn, count = graph.loss_index, len(graph.operations)
    steps = range(turn, count, (count - turn) // 8)
    without, bound, ways = _bounds(problem, [Cut(step) for step in steps], [])
    assert bound > 1.1 * without
    again = _bounds(problem, [Cut(step) for step in steps], ways)
    assert again[1] == pytest.approx(bound, rel=1e-3)
