"""Plans whose operations run in another order than they were captured in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.errors import InfeasibleBudgetError, PlanFileError, PlanMismatchError
from planner.ir.graph import TrainingGraph
from planner.ir.order import order_of
from planner.ir.simulator import simulate
from planner.ir.static_memory import StaticMemory
from planner.plans.ordering import in_orders_tried
from planner.plans.plan import Plan, PlanOrigin
from planner.plans.reuse import take_over
from planner.report.verdict import order_saves, verdict
from planner.solving.peak_bounds import proven_lowest
from tests.orders import branches
from tests.planned import make_plan, make_problem

GRAPH, COSTS = branches()
TIGHT = 26_000
ORIGIN = PlanOrigin(fingerprint={"graph": "branches", "assumes": ""})


def planned(graph: TrainingGraph = GRAPH, budget: int = TIGHT, **asked: object) -> Plan:
    return make_plan(
        graph, COSTS, budget=budget, deterministic=True, time_limit_seconds=0.2, origin=ORIGIN, **asked  # type: ignore[arg-type]
    )  # fmt: skip


plan = pytest.fixture(scope="module")(planned)


def test_branches_one_by_one_cost_less(plan: Plan) -> None:
    fixed = planned(replace(GRAPH, runs_after=None))
    assert plan.order and not fixed.order
    assert plan.captured_order is not None and plan.captured_order.recompute_seconds is not None
    assert plan.recompute_seconds <= 0.75 * fixed.recompute_seconds
    assert plan.peak_bytes <= TIGHT
    assert (plan.baseline_peak_bytes, plan.baseline_step_seconds) == (
        fixed.baseline_peak_bytes, fixed.baseline_step_seconds,
    )  # fmt: skip
    assert [row.name for row in plan.baselines[:-1]] == [row.name for row in fixed.baselines[:-1]]
    assert [row.peak_bytes for row in plan.baselines[:-1]] == [row.peak_bytes for row in fixed.baselines[:-1]]


def test_its_schedule_is_of_the_step_as_it_was_captured(plan: Plan) -> None:
    schedule = plan.schedule_for(GRAPH)
    assert order_of(schedule) != tuple(range(len(GRAPH.operations)))
    found = simulate(GRAPH, COSTS, schedule)
    assert found.peak_bytes == plan.peak_bytes
    assert found.recompute_seconds == pytest.approx(plan.recompute_seconds)


def test_a_plan_file_carries_the_order(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.schedule_for(GRAPH) == plan.schedule_for(GRAPH)
    assert "order" not in plan.report() and plan.report()["captured_order"]["moved"] == plan.captured_order.moved  # type: ignore[union-attr]
    with pytest.raises(PlanFileError):
        Plan.from_json(plan.to_json().replace('"order": {', '"order": {"a": 3, ', 1))


def test_a_step_whose_order_is_fixed_refuses_it(plan: Plan) -> None:
    with pytest.raises(PlanMismatchError, match="cannot run in another order"):
        plan.schedule_for(replace(GRAPH, runs_after=None))


def test_a_plan_in_another_order_is_taken_over(plan: Plan) -> None:
    problem = make_problem(GRAPH, COSTS, budget=TIGHT)
    taken = take_over(problem, plan, origin=ORIGIN, around=StaticMemory(), compare=True, asked_for=True)
    assert taken is not None
    assert (taken.order, taken.captured_order) == (plan.order, plan.captured_order)
    assert (taken.recomputations, taken.peak_bytes) == (plan.recomputations, plan.peak_bytes)


def test_where_everything_fits_nothing_moves() -> None:
    plan = planned(budget=10**6)
    assert not plan.order and plan.captured_order is None and plan.overhead == 0.0


def test_only_auto_looks_for_another_order() -> None:
    assert not planned(solver="ilp", budget=40_000).order


def test_the_report_says_what_it_saved(plan: Plan) -> None:
    said = order_saves(plan)
    assert said.startswith(f"{plan.captured_order.moved} operations moved") and "in the captured order" in said  # type: ignore[union-attr]
    assert "no plan in this order below" in verdict(plan)
    assert order_saves(planned(budget=10**6)) == ""


def test_what_is_proven_is_proven_of_both_orders() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        planned(budget=9_000)
    assert caught.value.is_proven
    other, captured = reversed(in_orders_tried(make_problem(GRAPH, COSTS, budget=9_000)))
    assert caught.value.report["proven_minimum_peak_bytes"] == min(  # type: ignore[attr-defined]
        proven_lowest(other), proven_lowest(captured)
    )
