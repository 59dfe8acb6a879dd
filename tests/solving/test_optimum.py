"""Claims of optima and bounds held against brute force, with the order of operations free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.common.options import Search
from planner.errors import InfeasibleBudgetError
from planner.ir.graph import Phase
from planner.ir.order import in_own_order
from planner.ir.problem import Problem
from planner.plans.ordering import in_orders_tried, solved_in_best_order
from planner.solvers import solved
from tests.oracle import cheapest, random_graph
from tests.planned import problem_at
from tests.tiers import tiered

SEARCH = Search(time_limit_seconds=0.5, deterministic=True)


def _problem(seed: int) -> Problem:
    """Return a step of 6 to 10 operations in any order around a loss, at a budget between its ends."""
    graph, costs = random_graph(seed, operations=6 + seed % 5, plain=seed % 2 == 0)
    middle = len(graph.operations) // 2
    operations = list(graph.operations)
    operations[middle] = replace(operations[middle], phase=Phase.LOSS)
    graph = replace(graph, operations=tuple(operations), runs_after={})
    return problem_at((graph, costs), 0.6 + 0.1 * (seed % 4))


@pytest.mark.parametrize("seed", tiered(range(500), quick=range(12)))
def test_every_claimed_optimum_is_one_and_no_bound_is_above_it(seed: int) -> None:
    problem = _problem(seed)
    free = cheapest(problem, in_any_order=True)
    try:
        found = solved_in_best_order(problem, SEARCH, lambda one, search: solved(one, search.solver, effort=search))
    except InfeasibleBudgetError as error:
        orders = in_orders_tried(problem)
        assert not error.is_proven or not any(cheapest(one) for one in orders)
        return
    evaluation = problem.evaluate(found.schedule)
    assert evaluation.peak_bytes <= problem.budget_bytes
    assert free is not None and evaluation.recompute_seconds >= free[0] - 1e-9
    assert problem.evaluate(free[1]).recompute_seconds == pytest.approx(free[0])
    own = cheapest(in_own_order(problem, found.schedule)[0])
    assert own is not None and found.lower_bound_seconds <= own[0] + 1e-9 <= found.recompute_seconds + 2e-9
    assert not found.is_optimal or found.recompute_seconds == pytest.approx(own[0])
