"""Branch and bound: its bound only rises, never above the optimum, and is that in the end."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ir.problem import Problem
from planner.solving.branch_and_bound import Branching, Node, Tree
from planner.solving.cutting_planes import BudgetRows, PathRows
from planner.solving.milp import Relaxation, minimise
from planner.solving.step_cut import Cut, Model, build
from tests.oracle import cheapest, random_graph
from tests.planned import problem_at


def _problem(seed: int) -> Problem:
    share = random.Random(seed).choice([0.6, 0.7, 0.8])
    return problem_at(random_graph(seed, operations=9, plain=seed % 2 == 0), share)


def _tree(problem: Problem, cuts: list[Cut]) -> tuple[Model, Tree] | None:
    model = build(problem, cuts)
    if model is None:
        return None
    relaxation = Relaxation(model)
    paths, budgets = PathRows(problem, cuts, model), BudgetRows(model)

    def add_broken(columns: list[float]) -> int:
        return paths.add_broken(columns) + budgets.add_broken(columns)

    branching = Branching(problem, cuts, model)
    tree = Tree(model, branching, relaxation, add_broken, lambda turns: relaxation.solve(turns=turns))
    assert tree.open_nodes([{}], math.inf)
    return model, tree


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_it_ends_at_the_optimum_of_the_programme_and_is_never_above(seed: int) -> None:
    problem = _problem(seed)
    cuts = [Cut(step) for step in range(2, 9) if random.Random(seed).random() < 0.7 or step > 6]
    made, best = _tree(problem, cuts), cheapest(problem)
    if made is None:
        assert best is None
        return
    model, tree = made
    rows = list(model.rows)
    least = minimise(Model(cost=model.cost, integer=model.integer, rows=rows))
    leaf: Node | None = None
    risen_to = 0.0
    while tree.open and leaf is None:
        leaf = tree.branch(math.inf)
        assert risen_to - 1e-9 <= tree.bound(math.inf)
        risen_to = tree.bound(math.inf)
    if leaf is None:
        assert least.infeasible and best is None
        return
    assert leaf.bound == pytest.approx(least.bound, rel=1e-5, abs=1e-5)
    assert all(min(leaf.columns[c], 1 - leaf.columns[c]) < 1e-4 for again in model.run_again for c in again.values())
    if best is not None:
        assert leaf.bound * max(cost.seconds for cost in problem.costs) <= best[0] + 1e-6


@pytest.mark.parametrize("seed", range(30))
def test_what_is_no_cheaper_than_a_known_plan_is_dropped(seed: int) -> None:
    problem = _problem(seed)
    made, best = _tree(problem, [Cut(step) for step in range(2, 9)]), cheapest(problem)
    if made is None or best is None:
        return
    cutoff = best[0] / max(cost.seconds for cost in problem.costs)
    _, tree = made
    for _ in range(200):
        if not tree.open or tree.branch(cutoff) is not None:
            break
    assert tree.bound(cutoff) <= cutoff
