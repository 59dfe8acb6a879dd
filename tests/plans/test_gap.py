"""A gap is explained by what moved in the second half of the time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.common.limits import Clock, SolveLimits
from planner.findings.finding import Finding
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.plans.from_solution import gap_finding, price_finding
from planner.solvers import solve
from planner.solving.incumbent import Incumbent
from tests.oracle import gpt_like, resnet_like

GRAPH, COSTS = gpt_like(3)
PROBLEM = Problem(graph=GRAPH, costs=COSTS, budget_bytes=1)
STEP_SECONDS = PROBLEM.baseline.seconds
LIMITS = SolveLimits(time_limit_seconds=10.0)


def explained(plan: float, bound: float, plan_then: float | None, bound_then: float | None = 0.0) -> Finding | None:
    """Explain a gap between percentages of the step, now and after half of the time."""
    share = STEP_SECONDS / 100
    evaluation = replace(PROBLEM.baseline, recompute_seconds=plan * share)
    solution = Solution(
        solver="auto",
        schedule=Schedule.keep_all(GRAPH),
        peak_bytes=evaluation.peak_bytes,
        recompute_seconds=plan * share,
        lower_bound_seconds=bound * share,
        halfway_added_seconds=None if plan_then is None else plan_then * share,
        halfway_bound_seconds=None if bound_then is None else bound_then * share,
    )
    return gap_finding(PROBLEM, solution, evaluation, LIMITS)


@pytest.mark.parametrize(
    ("then", "cause", "fix"),
    [
        ((26.0, 10.0), "for the plan: in the second half of the time it fell by 6.0%", "save up to"),
        ((26.0, 8.0), "fell by 6.0% of the step, and the bound rose by 2.0%", "--time-limit 20 "),
        ((20.1, 6.0), "for the bound: the bound rose by 4.0%", "prove more and save little"),
        ((20.0, 10.0), "neither plan nor bound moved", "change little"),
        ((None, 10.0), "the first one was found in the second half", "find a cheaper one"),
        ((20.0, None), "a cheaper plan may exist", "give the solver more time"),
    ],
)
def test_it_says_for_which_time_ran_out(then: tuple[float | None, float | None], cause: str, fix: str) -> None:
    found = explained(20.0, 10.0, *then)
    assert found is not None and cause in found.cause and fix in found.fix
    assert "10.0%" in found.evidence


def test_small_gaps_need_no_word() -> None:
    assert explained(10.4, 10.0, 20.0) is None
    assert explained(10.4, 0.0, 20.0) is None, "without a bound nothing is known"


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


def test_what_was_known_after_half_of_the_time_is_told() -> None:
    incumbent = Incumbent(replace(PROBLEM, budget_bytes=PROBLEM.baseline.peak_bytes))
    incumbent.clock = Clock(10.0, counts_work=True)
    incumbent.raise_bound(1.0)
    incumbent.clock.work(4.0)
    incumbent.update(Schedule.keep_all(GRAPH), "test")
    found = incumbent.solution()
    assert (found.halfway_added_seconds, found.halfway_bound_seconds) == (None, 1.0)
    incumbent.clock.work(6.0)
    assert incumbent.solution().halfway_added_seconds == 0.0


def test_a_gap_that_rounding_made_is_none() -> None:
    told: list[str] = []
    incumbent = Incumbent(replace(PROBLEM, budget_bytes=PROBLEM.baseline.peak_bytes), told.append)
    incumbent.raise_bound(1e-9)
    incumbent.update(Schedule.keep_all(GRAPH), "test")
    assert told and all("-0.00" not in line for line in told)


def test_a_search_tells_it_of_itself_and_the_same_every_time() -> None:
    graph, costs = resnet_like(10)
    whole = Problem(graph=graph, costs=costs, budget_bytes=0)
    problem = replace(whole, budget_bytes=int(0.6 * whole.baseline.peak_bytes))
    one, other = (solve(problem, time_limit_seconds=0.5, deterministic=True) for _ in range(2))
    assert one.halfway_bound_seconds is not None and 0 < one.halfway_bound_seconds <= one.lower_bound_seconds
    assert one.halfway_added_seconds is None or one.halfway_added_seconds >= one.recompute_seconds
    assert replace(one, solve_seconds=0.0) == replace(other, solve_seconds=0.0)
