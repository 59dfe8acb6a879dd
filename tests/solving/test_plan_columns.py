"""Plans as solutions of programmes: they keep every row of every kind, and cost no more there."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import ScheduleError
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule, recompute_lazily
from planner.solving.cutting_planes import BudgetRows, PathRows
from planner.solving.milp import Relaxation
from planner.solving.repair import without_useless
from planner.solving.step_cut import Cut, Model, build, needed_after
from tests.oracle import random_graph
from tests.solving.plan_columns import columns_of


def random_plan(rng: random.Random, problem: Problem) -> Schedule:
    """Drop values at random, make them again, and some of them too early."""
    graph = problem.graph
    count = len(graph.operations)
    dropped = {step: [u for u in range(len(graph.values)) if rng.random() < 0.4] for step in range(count)}
    try:
        schedule = recompute_lazily(graph, dropped)
    except ScheduleError:
        return Schedule.keep_all(graph)
    order = list(schedule.order)
    for _ in range(3):
        operation = rng.randrange(count)
        at = rng.randrange(len(order) + 1)
        if operation in order[:at] and graph.operations[operation].recomputable:
            order.insert(at, operation)
    return Schedule(tuple(without_useless(problem, order)))


def random_cuts(rng: random.Random, problem: Problem) -> list[Cut]:
    found: list[Cut] = []
    count = len(problem.graph.operations)
    for step in range(1, count):
        if rng.random() < 0.5:
            continue
        if found and found[-1].step == step - 1:
            for _ in range(rng.choice([0, 0, 1, 2])):
                again = frozenset(o for o in needed_after(problem, step - 1)[0] if rng.random() < 0.3)
                found += [Cut(step, again)] if again else []
        found.append(Cut(step))
    return found or [Cut(count - 1)]


def _broken(model: Model, columns: list[float]) -> Iterator[object]:
    for terms, least in model.rows:
        if sum(weight * columns[column] for column, weight in terms) < least - 1e-9:
            yield terms, least


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_a_plan_keeps_every_row(seed: int) -> None:
    rng = random.Random(seed)
    graph, costs = random_graph(seed, operations=rng.choice([6, 9, 14]), plain=rng.random() < 0.5)
    whole = Problem(graph=graph, costs=costs, budget_bytes=0)
    plan = random_plan(rng, whole)
    evaluation = whole.evaluate(plan)
    problem = Problem(graph=graph, costs=costs, budget_bytes=evaluation.peak_bytes + rng.choice([0, 0, 1]))
    every = random_cuts(rng, problem)
    few = [cut for cut in every if not cut.again and rng.random() < 0.5] or every
    ways, roundings = [], []
    for cuts in (few, every):  # rows that matter are known where there are more cuts
        model = build(problem, cuts)
        assert model is not None, "a plan keeps the budget"
        paths, budgets = PathRows(problem, cuts, model, ways), BudgetRows(model, roundings)
        relaxation = Relaxation(model)
        for _ in range(8):
            found = relaxation.solve()
            assert found.columns is not None
            if not paths.add_broken(found.columns) + budgets.add_broken(found.columns):
                break
        ways, roundings = [way for way, _ in paths.places], [each for each, _ in budgets.places]
        columns = columns_of(problem, cuts, model, plan)
        assert not list(_broken(model, columns))
        scale = max(cost.seconds for cost in costs)
        paid = scale * sum(cost * column for cost, column in zip(model.cost, columns, strict=True))
        assert paid <= evaluation.recompute_seconds + 1e-9
