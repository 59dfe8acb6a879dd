"""The problem that programmes are written for, beside the one that is asked."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.common.limits import SolveLimits
from planner.ir.problem import Problem
from planner.solvers import solved
from planner.solving import presolve
from planner.solving.presolve import merged, without_small
from tests.oracle import cheapest, lowest, random_graph, resnet_like
from tests.planned import problem_at
from tests.solving.test_plan_columns import random_plan
from tests.tiers import tiered


def _problem(seed: int, share: float) -> Problem:
    return problem_at(random_graph(seed, operations=9, plain=seed % 3 > 0), share)


@pytest.mark.parametrize("seed", range(60))
def test_every_plan_takes_the_same_at_each_moment_with_merged_values(seed: int) -> None:
    problem, rng = _problem(seed, 0.7), random.Random(seed)
    one = merged(problem)
    for _ in range(10):
        plan = random_plan(rng, problem)
        assert one.evaluate(plan).timeline_bytes == problem.evaluate(plan).timeline_bytes


def test_a_batch_norm_has_one_value_for_both_statistics_and_small_ones_take_nothing() -> None:
    graph, costs = resnet_like(3)
    problem = Problem(graph=graph, costs=costs, budget_bytes=10**9)

    def num_sized(one: Problem) -> int:
        return sum(value.size_bytes > 0 for value in one.graph.values)

    one = merged(problem)
    few = without_small(one)
    assert num_sized(problem) >= num_sized(one) > num_sized(few)
    left_out_bytes = sum(value.size_bytes for value in one.graph.values)
    left_out_bytes -= sum(value.size_bytes for value in few.graph.values)
    assert 0 < left_out_bytes <= 5e-4 * problem.budget_bytes


@pytest.mark.parametrize("seed", tiered(range(100), quick=range(40)))
def test_the_optimum_is_exact_where_much_is_left_out_at_first(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presolve, "_SMALL_TOGETHER", 0.3)
    problem = _problem(seed, 1.0)
    floor_bytes = lowest(problem.graph, problem.costs)
    problem = replace(problem, budget_bytes=int(random.Random(seed).choice([1.0, 1.05, 1.1, 1.3]) * floor_bytes))
    best = cheapest(problem)
    found = solved(problem, "ilp", effort=SolveLimits(time_limit_seconds=20.0, deterministic=True))
    assert best is not None and found.recompute_seconds == pytest.approx(best[0])
    assert found.lower_bound_seconds <= best[0] + 1e-9
