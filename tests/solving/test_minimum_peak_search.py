"""The lowest plan: below where it began, never below what is proven, and the lowest there is on small graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from planner import solvers
from planner.common.limits import SolveLimits
from planner.errors import InfeasibleBudgetError
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.solvers import search, solve, solved
from planner.solvers.auto import AutoSolver
from planner.solving.minimum_peak_search import lowest_plan
from planner.solving.peak_bounds import minimum_peak
from tests.oracle import lowest, random_graph, resnet_like
from tests.planned import problem_at
from tests.tiers import tiered

pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="annealing needs numba")

LIMITS = SolveLimits(time_limit_seconds=0.5, deterministic=True)


def _found_and_lowest(seed: int) -> tuple[int, int]:
    problem = problem_at(random_graph(seed, operations=8, plain=seed % 2 == 0), 0)
    schedule = lowest_plan(problem, Schedule.keep_all(problem.graph), LIMITS)
    return problem.evaluate(schedule).peak_bytes, lowest(problem.graph, problem.costs)


@pytest.mark.parametrize(("seeds", "missed"), tiered([(range(15), 1), (range(15, 400), 24)], quick=[(range(15), 1)]))
def test_on_small_graphs_it_is_nearly_always_the_lowest_there_is(seeds: range, missed: int) -> None:
    """It proves nothing, so it may miss; it counts work and not time, so it misses as many every time."""
    found = [_found_and_lowest(seed) for seed in seeds]
    assert all(peak >= least for peak, least in found)
    assert sum(peak > least for peak, least in found) <= missed


def test_it_goes_below_what_quick_methods_find_and_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = resnet_like(12)
    quick = minimum_peak(graph, costs)
    problem = Problem(graph=graph, costs=costs, budget_bytes=quick.proven_peak_bytes)
    limits = replace(LIMITS, time_limit_seconds=0.2)
    found = problem.evaluate(lowest_plan(problem, quick.schedule, limits))
    assert quick.proven_peak_bytes <= found.peak_bytes < quick.found_peak_bytes
    peaks: list[int] = []

    def told(problem: Problem, *rest: Any) -> Schedule:
        schedule = lowest_plan(problem, *rest)
        peaks.append(problem.evaluate(schedule).peak_bytes)
        return schedule

    monkeypatch.setattr(search, "lowest_plan", told)
    too_little = Problem(graph=graph, costs=costs, budget_bytes=quick.proven_peak_bytes - 1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(too_little, time_limit_seconds=0.2, deterministic=True)
    assert caught.value.minimum_feasible_peak_bytes == min(peaks) < quick.found_peak_bytes


def test_it_stops_at_the_budget() -> None:
    problem = problem_at(resnet_like(8), 0.8)
    found = problem.evaluate(lowest_plan(problem, Schedule.keep_all(problem.graph), LIMITS))
    assert 0.9 * problem.budget_bytes < found.peak_bytes <= problem.budget_bytes


def test_no_floor_is_proven_on_the_way_to_a_plan(calls: Callable[..., Any]) -> None:
    graph, costs = resnet_like(8)
    problem = Problem(graph=graph, costs=costs, budget_bytes=minimum_peak(graph, costs).found_peak_bytes)
    asked, proofs = calls(search, "proven_peak"), calls(solvers, "minimum_peak")
    assert problem.evaluate(AutoSolver().lowest(problem, effort=LIMITS)).peak_bytes <= problem.budget_bytes
    with pytest.raises(InfeasibleBudgetError):
        solved(replace(problem, budget_bytes=1), "sqrt", effort=LIMITS)
    assert not asked and not proofs
