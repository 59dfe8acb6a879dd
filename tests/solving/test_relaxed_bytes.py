"""Bytes of relaxed solutions at first runs: what a cut there would tell them."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ir.problem import Problem
from planner.solving.milp import minimise
from planner.solving.relaxed_bytes import bytes_between
from planner.solving.step_cut import Cut, build, carry_out
from tests.oracle import random_graph, resnet_like
from tests.solving.plan_columns import columns_of


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_whole_solutions_take_no_more_than_their_schedules(seed: int) -> None:
    rng = random.Random(seed)
    graph, costs = random_graph(seed, operations=14, plain=True)
    whole = Problem(graph=graph, costs=costs, budget_bytes=0)
    problem = Problem(graph=graph, costs=costs, budget_bytes=int(0.6 * whole.baseline.peak_bytes))
    cuts = [Cut(step) for step in range(6, 14) if rng.random() < 0.4] or [Cut(9)]
    model = build(problem, cuts)
    found = minimise(model) if model is not None else None
    if model is None or found is None or found.columns is None:
        return
    columns = columns_of(problem, cuts, model, carry_out(problem, cuts, model, found.columns)[0])
    schedule, _ = carry_out(problem, cuts, model, columns)
    timeline, first = problem.evaluate(schedule).timeline_bytes, schedule.first_runs()
    between = bytes_between(problem, cuts, model, columns)
    assert [list(part) for part in between] == [
        list(range(cut.step + 1, end)) for cut, end in zip(cuts, [*(cut.step for cut in cuts[1:]), 14], strict=True)
    ]
    for part in between:
        assert all(size_bytes <= timeline[first[step]] + 1e-6 for step, size_bytes in part.items())


def test_a_cut_where_shares_are_most_over_the_budget_raises_the_bound() -> None:
    graph, costs = resnet_like(8)
    whole = Problem(graph=graph, costs=costs, budget_bytes=0)
    problem = Problem(graph=graph, costs=costs, budget_bytes=int(0.4 * whole.baseline.peak_bytes))
    cuts = [Cut(whole.baseline.peak_position)]
    bounds = []
    for _ in range(4):
        model = build(problem, cuts)
        assert model is not None
        found = minimise(model, relax=True)
        assert found.columns is not None
        bounds.append(found.bound)
        sizes = {
            step: size for part in bytes_between(problem, cuts, model, found.columns) for step, size in part.items()
        }
        worst = max(sizes, key=sizes.__getitem__)
        if sizes[worst] <= problem.budget_bytes:
            break
        cuts = sorted([*cuts, Cut(worst)], key=lambda cut: cut.step)
    assert len(cuts) > 1
    assert bounds[-1] > 1.02 * bounds[0]
