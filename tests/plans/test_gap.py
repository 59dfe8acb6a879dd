"""What is said of plans far from their bound, and of those dearer than the step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.common.limits import SolveLimits
from planner.common.options import Search
from planner.findings.finding import Finding
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.plans import planning
from planner.plans.from_solution import gap_finding, price_finding
from planner.solvers import search
from planner.solving import solution_cache
from planner.solving.incumbent import Incumbent
from tests.example_graphs import transformer
from tests.planned import make_plan

GRAPH, COSTS = transformer(3)
PROBLEM = Problem(graph=GRAPH, costs=COSTS, budget_bytes=1)
STEP_SECONDS = PROBLEM.baseline.seconds
LIMITS = SolveLimits(time_limit_seconds=10.0)


def found_between(plan: float, bound: float) -> Finding | None:
    """Return what is said of a gap between percentages of the step."""
    share = STEP_SECONDS / 100
    evaluation = replace(PROBLEM.baseline, recompute_seconds=plan * share)
    solution = Solution(
        solver="auto",
        schedule=Schedule.keep_all(GRAPH),
        peak_bytes=evaluation.peak_bytes,
        recompute_seconds=plan * share,
        lower_bound_seconds=bound * share,
    )
    return gap_finding(PROBLEM, solution, evaluation, LIMITS)


def test_a_gap_names_the_time_limit_to_try_next() -> None:
    found = found_between(20.0, 10.0)
    assert found is not None and "10.0%" in found.evidence and "--time-limit 20)" in found.fix


def test_what_a_search_went_without_is_the_first_thing_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan found without annealing is not kept for the next search either, whose kernels may be there."""
    schedule = make_plan(GRAPH, COSTS, budget="80%", solver="sqrt").schedule_for(GRAPH)
    kept: list[str] = []
    monkeypatch.setattr(solution_cache, "keep", lambda key, solution, *, on_disk: kept.extend([key] * on_disk))
    monkeypatch.setattr(solution_cache, "find", lambda problem, key: None)
    found = replace(Solution.simulated(PROBLEM.evaluate(schedule), schedule, "auto"), lower_bound_seconds=1e-9)
    monkeypatch.setattr(planning, "_searched", lambda problem, search, known: found)
    for is_compiled, fix in ((False, "plan again: annealing"), (True, "give the solver more time")):
        for module in (search, planning):
            monkeypatch.setattr(module, "is_compiled", lambda is_compiled=is_compiled: is_compiled)
        (gap,) = make_plan(GRAPH, COSTS, budget="80%").warnings
        assert gap.fix.startswith(fix) and len(kept) == is_compiled
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    assert search.SOLVER.missing(Search()).startswith("pip install")
    assert search.SOLVER.missing(LIMITS) == search.SOLVER.missing(Search("ilp")) == ""


def test_small_gaps_need_no_word() -> None:
    assert found_between(10.4, 10.0) is None
    assert found_between(10.4, 0.0) is None, "without a bound nothing is known"


def test_a_plan_that_costs_more_than_the_step_is_said_to_be_near_the_smallest_budget() -> None:
    dear = replace(PROBLEM.baseline, recompute_seconds=1.5 * STEP_SECONDS)
    problem = replace(PROBLEM, budget_bytes=51 * 2**20 - GRAPH.total_static_bytes)
    found = price_finding(problem, dear, 50 * 2**20)
    assert found is not None and "what-if" in found.fix
    assert found.evidence == (
        "the plan takes 2.5 times as long as the step without it, with 2.0% more than the smallest budget known to be "
        "feasible, 50.0 MiB"
    )
    assert price_finding(problem, replace(dear, recompute_seconds=0.9 * STEP_SECONDS), None) is None


def test_a_gap_that_rounding_made_is_none() -> None:
    told: list[str] = []
    incumbent = Incumbent(replace(PROBLEM, budget_bytes=PROBLEM.baseline.peak_bytes), told.append)
    incumbent.raise_bound(1e-9)
    incumbent.update(Schedule.keep_all(GRAPH), "test")
    assert told and all("-0.00" not in line for line in told)
