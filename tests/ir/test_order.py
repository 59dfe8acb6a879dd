"""Orders of a step's operations: what is allowed, and how they are written out and read back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanMismatchError, ScheduleError
from planner.ir.order import check_order, in_own_order, moved, needed, order_of, order_with, renumbered, reordered
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule, recompute_lazily
from tests.orders import any_order, branches
from tests.planned import problem_at


@given(st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_an_order_is_written_out_and_read_back(rng: random.Random) -> None:
    graph, _ = branches()
    order = any_order(graph, rng)
    moves = moved(graph, order)
    assert order_with(graph, moves) == order
    assert sum(map(len, moves.values())) <= sum(place != index for place, index in enumerate(order))


def test_the_captured_order_moves_nothing() -> None:
    graph, _ = branches()
    assert moved(graph, range(len(graph.operations))) == {}
    assert order_with(graph, {}) == tuple(range(len(graph.operations)))


@given(st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_bytes_are_those_of_the_schedule_however_its_operations_are_numbered(rng: random.Random) -> None:
    problem = problem_at(branches(), 0)
    graph, order = problem.graph, any_order(problem.graph, rng)
    other = reordered(problem, order)
    dropped = [u for u, maker in enumerate(other.graph.producer) if maker < graph.loss_index and rng.random() < 0.5]
    schedule = recompute_lazily(other.graph, {graph.loss_index: dropped})
    captured = renumbered(schedule, order)
    assert order_of(captured) == order
    assert problem.evaluate(captured) == other.evaluate(schedule)
    own, same = in_own_order(problem, captured)
    assert (own.graph, same) == (other.graph, schedule)


def test_what_is_needed_comes_first_and_phases_stay_apart() -> None:
    graph, _ = branches()
    turn = graph.loss_index
    last = len(graph.operations) - 1
    backwards = tuple(reversed(range(last + 1)))
    with pytest.raises(ScheduleError, match="which must come first"):
        check_order(graph, backwards)
    across = [*range(turn - 1), turn, turn - 1, *range(turn + 1, last + 1)]
    with pytest.raises(ScheduleError, match="must come first"):
        check_order(graph, across)
    with pytest.raises(ScheduleError, match="each operation once"):
        check_order(graph, [*range(last), 0])


def test_a_graph_of_which_nothing_is_known_keeps_its_order() -> None:
    graph, costs = branches()
    fixed = replace(graph, runs_after=None)
    order = any_order(graph, random.Random(1))
    with pytest.raises(ScheduleError, match="cannot run in another order"):
        reordered(Problem(graph=fixed, costs=costs, budget_bytes=0), order)


def test_an_order_of_another_step_is_refused() -> None:
    graph, _ = branches()
    with pytest.raises(PlanMismatchError, match="does not have"):
        order_with(graph, {graph.operations[-1].key: ("nothing|like|this",)})
    first, last = graph.operations[0].key, graph.operations[-1].key
    with pytest.raises(PlanMismatchError, match="cannot be that of"):
        order_with(graph, {first: (last,)})


def test_what_must_stay_in_order_does_though_no_value_passes() -> None:
    graph, _ = branches()
    first, second, *_ = (index for index, o in enumerate(graph.operations) if o.target == "start")
    tied = replace(graph, runs_after={second: (first,)})
    swapped = list(range(len(graph.operations)))
    swapped.remove(second)
    swapped.insert(first, second)
    check_order(graph, swapped)
    with pytest.raises(ScheduleError):
        check_order(tied, swapped)
    assert first in needed(tied)[second]


def test_a_schedule_in_base_order_is_its_own() -> None:
    problem = problem_at(branches(), 0)
    schedule = Schedule.keep_all(problem.graph)
    assert in_own_order(problem, schedule) == (problem, schedule)
