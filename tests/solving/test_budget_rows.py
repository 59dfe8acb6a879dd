"""Rows that a budget implies for whole values: they cut off shares of values, and no plan."""

from __future__ import annotations

import random
from itertools import product

import pytest

from planner.ir.problem import Problem
from planner.solving.cutting_planes import BudgetRows, Rounding
from planner.solving.milp import minimise
from planner.solving.step_cut import Cut, Model, Room, build
from tests.oracle import resnet_like
from tests.solving.relaxations import bounds, hold_to_the_cheapest_plan


def _room(sizes: list[int], free_bytes: int) -> Model:
    return Model(cost=[0.0] * len(sizes), rooms=[Room(Cut(0), dict(enumerate(sizes)), free_bytes)])


def test_of_three_equal_values_two_fit_where_a_relaxation_holds_most_of_each() -> None:
    model = _room([4, 4, 4], 11)
    assert BudgetRows(model).add_broken([11 / 12] * 3) == 1
    [(terms, least)] = model.rows

    def keeps(*columns: float) -> bool:
        return sum(weight * columns[column] for column, weight in terms) >= least

    assert keeps(1, 1, 0)
    assert not keeps(1, 1, 1)
    assert not keeps(11 / 12, 11 / 12, 11 / 12)
    assert not keeps(1, 1, 0.5)


@pytest.mark.parametrize("seed", range(60))
def test_no_whole_choice_that_fits_breaks_a_row_and_the_shares_do(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 4, 8, 12, 13, 2**30 + 1, 2**31]) for _ in range(9)]
    free_bytes = rng.randrange(sum(sizes) + 1)
    shares = [rng.choice([0.0, 1.0, rng.random()]) for _ in sizes]
    model = _room(sizes, free_bytes)
    BudgetRows(model).add_broken(shares)
    for terms, least in model.rows:
        assert sum(weight * shares[column] for column, weight in terms) < least
        for whole in product((0, 1), repeat=len(sizes)):
            if sum(size * one for size, one in zip(sizes, whole, strict=True)) <= free_bytes:
                assert sum(weight * whole[column] for column, weight in terms) >= least


def _rows(_problem: Problem, _cuts: list[Cut], model: Model, known: list[Rounding]) -> BudgetRows:
    return BudgetRows(model, known)


@pytest.mark.parametrize("seed", range(40))
def test_no_bound_with_them_is_above_the_cheapest_plan(seed: int) -> None:
    hold_to_the_cheapest_plan(seed, _rows, ((4,), (4, 6), (2, 3, 4, 5, 6, 7, 8)))


def test_between_cuts_of_a_tight_budget_the_bound_rises() -> None:
    graph, costs = resnet_like(4)
    whole = Problem(graph=graph, costs=costs, budget_bytes=0)
    problem = Problem(graph=graph, costs=costs, budget_bytes=whole.baseline.peak_bytes // 2)
    turn, count = graph.loss_index, len(graph.operations)
    cuts = [Cut(step) for step in range(turn, count, (count - turn) // 8)]
    without, bound, known = bounds(problem, cuts, _rows, [])
    assert bound > 1.1 * without
    again = build(problem, [Cut(turn - 1), *cuts])
    assert again is not None
    BudgetRows(again, known)
    assert minimise(again, relax=True).bound * max(cost.seconds for cost in costs) > 0.999 * bound
