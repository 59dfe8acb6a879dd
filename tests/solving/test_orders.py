"""Other orders of a step, and what they need."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.ir.graph import Phase
from planner.ir.order import check_order, reordered
from planner.ir.problem import Problem
from planner.solving.orders import branch_by_branch, need, promising_order
from tests.example_graphs import transformer
from tests.oracle import random_graph
from tests.orders import branches
from tests.planned import problem_at


def test_branches_taken_a_layer_at_a_time_are_better_taken_one_by_one() -> None:
    problem = problem_at(branches(count=4, depth=6), 0)
    order = promising_order(problem)
    assert order is not None
    assert need(reordered(problem, order)) < need(problem)


def test_a_chain_is_left_as_it_is() -> None:
    graph, costs = transformer()
    problem = Problem(graph=replace(graph, runs_after={}), costs=costs, budget_bytes=0)
    assert promising_order(problem) is None


def test_where_the_order_is_fixed_there_is_no_other() -> None:
    graph, _ = branches()
    assert branch_by_branch(replace(graph, runs_after=None)) is None
    without_loss = [replace(operation, phase=Phase.FORWARD) for operation in graph.operations]
    assert branch_by_branch(replace(graph, operations=tuple(without_loss))) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_one_that_the_step_allows(seed: int) -> None:
    graph, costs = random_graph(seed, operations=30)
    middle = graph.operations[15]
    operations = list(graph.operations)
    operations[15] = replace(middle, phase=Phase.LOSS)
    rng = random.Random(seed)
    after = {index: (rng.randrange(index),) for index in rng.sample(range(1, 30), 8)}
    graph = replace(graph, operations=tuple(operations), runs_after=after)
    if (order := branch_by_branch(graph)) is not None:
        check_order(graph, order)
    order = promising_order(problem := Problem(graph=graph, costs=costs, budget_bytes=0))
    assert order is None or need(reordered(problem, order)) < need(problem)
