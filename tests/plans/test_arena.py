"""A plan that was asked for an arena says what it takes beside the step's peak."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from planner.common.limits import SolveLimits
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.ir.static_memory import StaticMemory
from planner.plans.arena import arena_of, blocks_of
from planner.plans.plan import Plan
from planner.plans.planning import make_plan
from planner.report import render
from planner.solving.arena import lay_out
from tests import oracle
from tests.example_graphs import transformer

ASKED = StaticMemory(arena=True)
COUNTED = SolveLimits(time_limit_seconds=1.0, deterministic=True)


@given(st.integers(0, 10**6))
def test_its_lower_bound_is_the_simulated_peak(seed: int) -> None:
    graph, costs = oracle.random_graph(seed)
    schedule = Schedule.keep_all(graph)
    found = lay_out(blocks_of(graph, costs, schedule), alignment_bytes=1, limits=COUNTED)
    assert found.lower_bound_bytes == simulate(graph, costs, schedule).peak_bytes


def test_a_plan_has_one_only_if_it_was_asked_for() -> None:
    graph, costs = transformer()
    problem = Problem(graph=graph, costs=costs, budget_bytes=2**60)
    schedule = Schedule.keep_all(graph)
    assert arena_of(problem, schedule, StaticMemory()) is None
    found = arena_of(problem, schedule, ASKED)
    assert found is not None
    assert found.step_peak_bytes == problem.baseline.peak_bytes
    assert found.step_peak_bytes <= found.lower_bound_bytes <= found.size_bytes


@pytest.fixture
def plan() -> Plan:
    graph, costs = transformer()
    problem = Problem(graph=graph, costs=costs, budget_bytes=2**60)
    return make_plan(problem, static_memory=ASKED)


def test_a_recomputed_step_needs_no_more_than_is_planned() -> None:
    graph, costs = transformer()
    whole = Problem(graph=graph, costs=costs, budget_bytes=2**60)
    budget_bytes = int(0.7 * whole.baseline.peak_bytes)
    plan = make_plan(Problem(graph=graph, costs=costs, budget_bytes=budget_bytes), static_memory=ASKED)
    assert plan.arena is not None and plan.recompute_seconds > 0
    assert plan.arena.size_bytes <= 1.02 * plan.arena.step_peak_bytes


def test_the_report_and_the_file_have_it(plan: Plan) -> None:
    assert plan.arena is not None
    assert Plan.from_json(plan.to_json()).arena == plan.arena
    assert plan.report()["predicted"]["arena"]["size_bytes"] == plan.arena.size_bytes
    console = Console(width=200, record=True, file=StringIO())
    render(plan, console, full=True)
    assert f"has places for all {plan.arena.tensors} tensors of the step: 1.0" in console.export_text()
