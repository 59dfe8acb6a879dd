"""Rows of ways back and of budgets: they cut off shares of values, and no plan (see test_plan_columns.py)."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from planner.ir.problem import Problem
from planner.solving.cutting_planes import BudgetRows, PathRows
from planner.solving.milp import Relaxation, minimise
from planner.solving.step_cut import Cut, Model, Room, build
from tests.oracle import resnet_like
from tests.planned import problem_at


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


@pytest.mark.parametrize(
    ("rows_of", "blocks", "share"),
    [(PathRows, 12, 0.35), (lambda problem, cuts, model, known: BudgetRows(model, known), 4, 0.5)],
)
def test_between_cuts_of_a_tight_budget_bounds_rise_and_stay_where_the_rows_that_matter_are_known(
    rows_of: Callable[[Problem, list[Cut], Model, list[Any]], Any], blocks: int, share: float
) -> None:
    problem = problem_at(resnet_like(blocks), share)
    turn, count = problem.graph.loss_index, len(problem.graph.operations)
    cuts = [Cut(step) for step in range(turn, count, (count - turn) // 8)]
    model, again = build(problem, cuts), build(problem, cuts)
    assert model is not None and again is not None
    without = minimise(model, relax=True).bound
    rows, relaxation = rows_of(problem, cuts, model, []), Relaxation(model)
    while rows.add_broken((found := relaxation.solve()).columns or []):
        pass
    assert found.bound > 1.1 * without
    assert all(len({column for column, _ in terms}) == len(terms) for terms, _ in model.rows)
    rows_of(problem, cuts, again, rows.binding(relaxation.prices()))
    assert minimise(again, relax=True).bound > 0.999 * found.bound
