"""Budgets held against the blocks of CUDA's allocator: a plan is solved for less until they fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.common.limits import Clock
from planner.errors import InfeasibleBudgetError
from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.ir.static_memory import StaticMemory
from planner.plans import in_blocks
from planner.plans.allocator import whole_peak_bytes
from planner.plans.in_blocks import solved_in_blocks
from planner.plans.plan import Plan, PlanOrigin
from planner.plans.reuse import take_over
from planner.solving import lowest_known
from planner.solving.segmentations import segmentations
from tests.example_graphs import Builder, transformer
from tests.planned import make_plan, make_problem

MIB = 2**20
CUDA = StaticMemory(has_caching_allocator=True)
ORIGIN_KEYS = {"graph": "g", "assumes": ""}


def tower(layers: int = 8, size: int = 11 * MIB + MIB // 2) -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    """Return layers whose results have segments of 12 MiB each: half a MiB of every block is no one's."""
    b = Builder()
    made = [b.add("input", [], [size], recomputable=False)[0]]
    for layer in range(layers):
        made += b.add("layer", [made[-1]], [size], module=f"layers.{layer}")
    gradient = b.add("loss", [made[-1]], [size], phase=Phase.BACKWARD, recomputable=False)[0]
    for layer in reversed(range(layers)):
        (gradient,) = b.add("back", [made[layer], made[layer + 1], gradient], [size], phase=Phase.BACKWARD)
    graph = b.graph("tower", {})
    return graph, tuple(b.costs)


def planned(budget: int, static_memory: StaticMemory = CUDA) -> Plan:
    return make_plan(*tower(), budget=budget, static_memory=static_memory, deterministic=True, compare=False)


def test_a_budget_for_what_is_asked_and_not_for_its_blocks_gets_a_lower_plan() -> None:
    asked = planned(2**40, StaticMemory()).peak_bytes
    without, with_blocks = planned(asked, StaticMemory()), planned(asked)
    assert without.peak_bytes == asked and not without.recomputations
    assert with_blocks.reserved is not None and with_blocks.reserved.allocated_bytes <= asked
    assert with_blocks.peak_bytes < asked and with_blocks.recomputations
    assert with_blocks.lower_bound_seconds <= with_blocks.recompute_seconds
    assert with_blocks.minimum_feasible_peak_bytes >= with_blocks.reserved.allocated_bytes


def test_a_percentage_of_blocks_leaves_the_step_as_it_is() -> None:
    graph, costs = tower()
    problem = make_problem(graph, costs, budget=2**40)
    blocks = whole_peak_bytes(problem, Schedule.keep_all(graph), CUDA)
    assert blocks > problem.baseline.peak_bytes
    assert not planned(blocks).recomputations


def test_what_the_error_says_is_enough_is_enough() -> None:
    with pytest.raises(InfeasibleBudgetError) as refusal:
        planned(3 * 11 * MIB)
    smallest = refusal.value.minimum_feasible_peak_bytes
    plan = planned(smallest)
    assert plan.reserved is not None and plan.reserved.allocated_bytes <= smallest
    between = next(p for p in range(plan.peak_bytes, smallest, 4096) if p < plan.reserved.allocated_bytes)
    with pytest.raises(InfeasibleBudgetError) as refusal:
        planned(between)
    assert refusal.value.minimum_feasible_peak_bytes <= smallest


def test_a_plan_is_taken_over_only_where_its_blocks_fit() -> None:
    graph, costs = tower()
    plan = replace(planned(2**40), fingerprint=ORIGIN_KEYS)
    origin = PlanOrigin(fingerprint=ORIGIN_KEYS)
    problem = make_problem(graph, costs, budget=plan.peak_bytes)
    options = {"origin": origin, "compare": False, "asked_for": True}
    assert take_over(problem, plan, around=StaticMemory(), **options) is not None
    assert take_over(problem, plan, around=CUDA, **options) is None


def test_of_two_plans_with_one_peak_the_one_that_an_error_spoke_of_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = tower(3)
    known = Schedule.keep_all(graph)
    found, budget = Schedule(order=known.order), make_problem(graph, costs, budget=2**40).baseline.peak_bytes
    problem = Problem(graph=graph, costs=costs, budget_bytes=budget)
    monkeypatch.setattr(in_blocks, "whole_peak_bytes", lambda _p, schedule, _m: budget + (schedule is not known) * MIB)

    def solve(asked: Problem) -> Solution:
        return Solution.simulated(problem.evaluate(found), found, "stub")

    with pytest.raises(InfeasibleBudgetError):
        solved_in_blocks(problem, CUDA, solve)
    assert solved_in_blocks(problem, CUDA, solve, lambda: known).schedule is known


def test_what_an_error_spoke_of_may_be_in_any_order() -> None:
    graph, costs = tower(3)
    problem = Problem(graph=graph, costs=costs, budget_bytes=1)
    assert lowest_known.said(problem) is None
    schedule = Schedule(order=tuple(reversed(range(len(graph.operations)))))
    lowest_known.say(problem, schedule)
    assert lowest_known.said(replace(problem, budget_bytes=2)) is schedule


@pytest.mark.parametrize("percent", range(49, 98, 3))
def test_a_regular_plan_keeps_what_blocks_have_room_for(percent: int) -> None:
    graph, costs = transformer(6)
    problem = make_problem(graph, costs, budget=f"{percent}%")
    budget_bytes = problem.budget_bytes + graph.total_static_bytes

    def solve(asked: Problem) -> Solution:
        if asked is not problem:
            raise InfeasibleBudgetError("none", minimum_feasible_peak_bytes=0, operation="")
        return Solution.simulated(problem.baseline, Schedule.keep_all(graph), "stub")

    fits = [each for each in segmentations(graph) if whole_peak_bytes(problem, each, CUDA) <= budget_bytes]
    found = solved_in_blocks(problem, CUDA, solve, clock=lambda: Clock(10.0))
    assert whole_peak_bytes(problem, found.schedule, CUDA) <= budget_bytes
    assert found.added_seconds < min(problem.evaluate(schedule).added_seconds for schedule in fits)
