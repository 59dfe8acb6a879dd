"""A policy decides single operations: plans follow it, and are the cheapest and the bound of those that do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import planner
from planner import solvers
from planner.common.options import Budget, Search
from planner.errors import InfeasibleBudgetError, UsageError
from planner.ir.host import Host
from planner.ir.policy import Decisions, backward_begins, decide, held_against, read_by_backward, run_once
from planner.ir.problem import Problem, confirm
from planner.plans.plan import NoPlanFitsError
from planner.plans.planning import make_plan, make_problem
from planner.plans.policy_reduction import PolicyReduction, solved_by_policy
from tests import oracle
from tests.example_graphs import transformer
from tests.runtimes.steps import assert_same, beside, train

SQRT = Search(solver="sqrt", deterministic=True, compare=False)
HOST = Host(bytes_per_second=1.0, budget_bytes=10**6, least_bytes=1)


def decided(seed: int, *choices: str, share: float) -> Problem:
    """Make a small problem in which about half of what the backward reads is decided."""
    graph, costs = oracle.random_graph(seed, operations=7, plain=True)
    turn = backward_begins(graph)
    made = [index for index in range(turn) if read_by_backward(graph, index)]
    decisions = {choice: frozenset(made[place :: 2 * len(choices)]) for place, choice in enumerate(choices)}
    problem = Problem(graph=run_once(graph, Decisions(**decisions)), costs=costs, budget_bytes=0, host=HOST)
    problem = replace(problem, decisions=Decisions(**decisions))
    return replace(problem, budget_bytes=round(share * problem.baseline.peak_bytes))


def solve(problem: Problem):
    return solvers.solve(problem, "ilp", deterministic=True, time_limit_seconds=0.1)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.7, 0.85, 1.0]))
def test_nothing_decided_is_held_and_the_bound_is_below_every_plan(seed, share):
    problem = replace(decided(seed, "recompute", share=share), host=None)
    reduction = PolicyReduction(problem)
    optimum = oracle.cheapest(reduction.problem)
    try:
        found = solved_by_policy(problem, solve)
    except InfeasibleBudgetError:
        assert optimum is None or held_against(
            problem.graph, problem.decisions, reduction.invert(solve(reduction.problem)).schedule
        )
        return
    confirm(problem, found)
    assert not held_against(problem.graph, problem.decisions, found.schedule)
    assert optimum is not None
    assert found.lower_bound_seconds <= optimum[0] + reduction.added_seconds + 1e-9
    assert found.added_seconds >= optimum[0] + reduction.added_seconds - 1e-9 or not problem.decisions.recompute


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.7, 0.85, 1.0]))
def test_what_is_offloaded_leaves_before_the_backward_and_returns_once(seed, share):
    problem = decided(seed, "offload", "recompute", "save", share=share)
    try:
        found = solved_by_policy(problem, solve)
    except InfeasibleBudgetError:
        return
    confirm(problem, found)
    offloaded = {u for index in problem.decisions.offload for u in read_by_backward(problem.graph, index)}
    assert {offload.value for offload in found.schedule.offloads} == offloaded
    assert all(found.schedule.order.count(index) == 1 for index in problem.decisions.save | problem.decisions.offload)


def test_answers_that_are_none_and_offload_without_a_host_are_refused():
    graph, _ = oracle.random_graph(1, plain=True)
    with pytest.raises(UsageError, match="answer 'save', 'recompute', 'offload' or None"):
        decide(graph, lambda operation: "keep", can_offload=False)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="give offload=True"):
        decide(graph, lambda operation: "offload", can_offload=False)


def test_a_plan_follows_the_policy_and_says_so():
    graph, costs = transformer(2)
    free = make_plan(make_problem(graph, costs, Budget("100%")), SQRT)
    assert not free.recomputations

    def policy(operation):
        return "recompute" if operation.output_bytes > 2**21 else None

    plan = make_plan(make_problem(graph, costs, Budget("100%"), policy=policy), SQRT)
    (note,) = (warning for warning in plan.warnings if warning.rule == "policy")
    assert "recomputed" in note.evidence
    assert plan.recomputations and plan.peak_bytes < free.peak_bytes
    assert plan.lower_bound_seconds > 0


def test_a_policy_that_breaks_the_budget_is_named():
    graph, costs = transformer(2)
    problem = make_problem(graph, costs, Budget("60%"), policy=lambda operation: "save")
    with pytest.raises(NoPlanFitsError, match=r"the policy decides .*: answer None for them, or give a larger budget"):
        make_plan(problem, SQRT)


def test_a_wrapped_model_follows_its_policy_with_the_bits_of_eager():
    def policy(operation):
        assert isinstance(operation, planner.PolicyOperation)
        return {"addmm": "recompute", "gelu": "save"}.get(operation.name)

    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    inputs = torch.randn(256, 64)
    plain, wrapped = beside(nn.Sequential(*layers), inputs, budget="110%", policy=policy, runtime="graph")
    assert_same(train(plain, inputs, torch.sum), train(wrapped, inputs, torch.sum))
    again = {key for keys in planner.plan_of(wrapped).recomputations.values() for key in keys}
    assert {key.split("|")[1] for key in again} == {"aten.addmm.default"} and len(again) == 4


def test_what_follows_no_policy_says_so():
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    for budget, runtime in (("90%", "modules"), (planner.Budget(strategy="every-2"), "graph")):
        with pytest.raises(planner.RuntimeUnsupportedError, match="follows no policy"):
            planner.plan(model, inputs, budget=budget, runtime=runtime, policy=lambda operation: None)
