"""Rows over ways back: no whole plan breaks them, and with them relaxations of several cuts come nearer to plans."""

from __future__ import annotations

import pytest

from planner.ir.problem import Problem
from planner.solving.cutting_planes import PathRows
from planner.solving.step_cut import Cut
from tests.oracle import resnet_like
from tests.solving.relaxations import bounds, hold_to_the_cheapest_plan


@pytest.mark.parametrize("seed", range(40))
def test_no_bound_with_them_is_above_the_cheapest_plan(seed: int) -> None:
    hold_to_the_cheapest_plan(seed, PathRows, ((4, 6), (2, 4, 6, 8), (2, 3, 4, 5, 6, 7, 8)))


def test_between_many_cuts_a_relaxation_no_longer_makes_values_of_halves() -> None:
    graph, costs = resnet_like(12)
    whole = Problem(graph=graph, costs=costs, budget_bytes=0)
    problem = Problem(graph=graph, costs=costs, budget_bytes=int(0.35 * whole.baseline.peak_bytes))
    turn, count = graph.loss_index, len(graph.operations)
    steps = range(turn, count, (count - turn) // 8)
    without, bound, ways = bounds(problem, [Cut(step) for step in steps], PathRows, [])
    assert bound > 1.1 * without
    again = bounds(problem, [Cut(step) for step in steps], PathRows, ways)
    assert again[1] == pytest.approx(bound, rel=1e-3)
