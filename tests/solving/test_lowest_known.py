"""What was once said to be feasible stays feasible, whatever a later search finds in its time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.common import cache_folder
from planner.common.limits import SolveLimits
from planner.common.options import Search
from planner.errors import InfeasibleBudgetError
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.plans import planning
from planner.plans.plan import NoPlanFitsError
from planner.solvers.auto import AutoSolver
from planner.solving import lowest_known
from planner.solving.peak_bounds import minimum_peak
from tests.example_graphs import transformer
from tests.planned import make_plan, study_of

GRAPH, COSTS = transformer(4)
PROBLEM = Problem(graph=GRAPH, costs=tuple(COSTS), budget_bytes=1)
LOWEST = minimum_peak(GRAPH, COSTS)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    monkeypatch.setattr(lowest_known, "_here", {})


@pytest.fixture
def _solvers_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(problem: Problem, *_: object, **__: object) -> Solution:
        peak_bytes = problem.baseline.peak_bytes + GRAPH.total_static_bytes
        raise InfeasibleBudgetError("gave up", minimum_feasible_peak_bytes=peak_bytes, operation="aten.mm.default")

    monkeypatch.setattr(planning, "solved", give_up)


def test_what_is_known_does_not_depend_on_the_budget_or_on_seconds() -> None:
    assert lowest_known.find(PROBLEM) is None
    lowest_known.keep(PROBLEM, LOWEST.schedule)
    slower = tuple(replace(cost, seconds=3 * cost.seconds + 1) for cost in COSTS)
    assert lowest_known.find(replace(PROBLEM, budget_bytes=10**9, costs=slower)) == LOWEST.schedule
    larger = tuple(replace(cost, workspace_bytes=cost.workspace_bytes + 64) for cost in COSTS)
    assert lowest_known.find(replace(PROBLEM, costs=larger)) is None


def test_a_budget_that_was_once_feasible_is_kept_where_no_search_finds_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for search in ("run", "descend"):
        monkeypatch.setattr(f"planner.solvers.auto._Race.{search}", lambda race: None)
    monkeypatch.setattr("planner.solvers.auto.lowest_schedule", lambda problem: Schedule.keep_all(problem.graph))
    budget = LOWEST.found_peak_bytes + GRAPH.total_static_bytes
    lowest_known.keep(PROBLEM, LOWEST.schedule)
    plan = make_plan(GRAPH, COSTS, budget=budget, time_limit_seconds=0.1)
    assert plan.peak_bytes <= budget
    with pytest.raises(NoPlanFitsError):
        make_plan(GRAPH, COSTS, budget=budget, time_limit_seconds=0.1, deterministic=True)


def test_the_lowest_plan_is_searched_for_before_a_budget_is_refused() -> None:
    error = InfeasibleBudgetError("gave up", minimum_feasible_peak_bytes=10**12, operation="aten.mm.default")
    asked = replace(PROBLEM, budget_bytes=LOWEST.found_peak_bytes)
    assert planning._goes_lower(asked, Search(time_limit_seconds=1), error)
    assert error.minimum_feasible_peak_bytes <= LOWEST.found_peak_bytes + GRAPH.total_static_bytes


@pytest.mark.usefixtures("_solvers_find_nothing")
def test_an_error_names_the_lowest_peak_that_was_ever_found_or_is_found_before_it_is_raised() -> None:
    lowest_known.keep(PROBLEM, LOWEST.schedule)
    with pytest.raises(NoPlanFitsError, match="known to be feasible") as caught:
        make_plan(GRAPH, COSTS, budget=GRAPH.total_static_bytes + LOWEST.proven_peak_bytes, time_limit_seconds=0.1)
    found_bytes = PROBLEM.evaluate(lowest_known.find(PROBLEM)).peak_bytes
    assert found_bytes == caught.value.minimum_feasible_peak_bytes - GRAPH.total_static_bytes <= LOWEST.found_peak_bytes


@pytest.mark.parametrize(("cache", "budget"), [("a folder", "30%"), ("off", "30%"), ("a folder", 1)])
def test_what_a_search_finds_is_kept(cache: str, budget: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is where the resident bytes alone break the budget."""
    if cache == "off":
        monkeypatch.setenv(cache_folder.VARIABLE, "off")
    with pytest.raises(NoPlanFitsError) as caught:
        make_plan(GRAPH, COSTS, budget=budget, time_limit_seconds=0.1)
    known = lowest_known.find(PROBLEM)
    assert known is not None
    peak_bytes = PROBLEM.evaluate(known).peak_bytes + GRAPH.total_static_bytes
    assert peak_bytes == caught.value.minimum_feasible_peak_bytes
    assert make_plan(GRAPH, COSTS, budget=peak_bytes, time_limit_seconds=0.1).peak_bytes <= peak_bytes


def test_what_a_curve_names_as_the_smallest_budget_is_known_to_later_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    study, effort = study_of(GRAPH, COSTS), SolveLimits(time_limit_seconds=0.1)
    lowest = study.lowest(PROBLEM, effort=effort)
    assert lowest_known.find(PROBLEM) == lowest
    monkeypatch.setattr(AutoSolver, "lowest", lambda solver, problem, **_: Schedule.keep_all(problem.graph))
    assert study.lowest(PROBLEM, effort=effort) == lowest
    assert study.lowest(PROBLEM, effort=replace(effort, deterministic=True)) == Schedule.keep_all(GRAPH)
