"""Repeated layers are found in sizes alone, and what is copied from one to another is a set of reruns like any."""

from __future__ import annotations

from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ir.graph import Operation, OperationCost, TrainingGraph, Value
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.solving.repeats import Repeats, Stretch, stretches
from planner.solving.rerun_set import SLOTS, RerunSet
from planner.solving.solution_pool import Member, Population
from tests.solvers.test_search import needs_numba

pytest.importorskip("numpy")

FORWARD, BACKWARD = [*range(2, 11)], [*range(21, 32)]
"""Bytes of what the operations of a layer make."""


def chain_of(sizes: list[int]) -> Problem:
    """Pose a problem of operations of which each reads what the one before made."""
    operations = tuple(
        Operation(name=f"o{i}", key=f"o{i}", target="", inputs=(i - 1,) if i else (), outputs=(i,))
        for i in range(len(sizes))
    )
    values = tuple(Value(name=f"v{i}", size_bytes=size) for i, size in enumerate(sizes))
    graph = TrainingGraph(operations=operations, values=values)
    return Problem(graph=graph, costs=(OperationCost(seconds=1.0),) * len(sizes), budget_bytes=sum(sizes))


def layered(layers: int = 4) -> Problem:
    return chain_of([99, 98, *FORWARD * layers, 97, *BACKWARD * layers, 96])


@given(st.lists(st.integers(1, 2), max_size=60))
def test_each_operation_of_a_stretch_is_like_the_one_a_period_later(sizes: list[int]) -> None:
    found = stretches(chain_of(sizes))
    before = [0, *sizes]
    for first, end, period in found:
        assert end - first >= 2 * period
        for i in range(first, end - period):
            assert (before[i], sizes[i]) == (before[i + period], sizes[i + period])
    covered = list(chain.from_iterable(range(each.first, each.end) for each in found))
    assert len(covered) == len(set(covered))


def test_layers_of_forward_and_backward_are_found() -> None:
    # The first operation of a stretch reads something else than those of later layers.
    found = sorted(stretches(layered()))
    assert found == [Stretch(3, 38, 9), Stretch(40, 83, 11)]


def test_a_later_layer_of_the_backward_belongs_to_an_earlier_one_of_the_forward() -> None:
    repeats = Repeats(layered())
    backward = repeats.stretch_of(50)
    assert backward == Stretch(40, 83, 11)
    assert repeats.stretch_of(0) is repeats.stretch_of(38) is None
    assert repeats.made_for(30, backward, 1) == 21
    assert repeats.made_for(30, backward, -1) is None  # there is no later layer
    assert repeats.made_for(50, backward, 2) == 72
    assert repeats.made_for(0, backward, 2) == 0


@needs_numba
def test_what_is_made_again_in_one_layer_is_copied_to_others() -> None:
    problem = layered()
    reruns, repeats, population = RerunSet(problem, 0), Repeats(problem), Population(Random(0))
    # Before operations of the first and second layer of the backward, parts of the last and second last of the forward.
    plan = Schedule.with_recomputations(problem.graph, {45: [30, 31], 56: [21]})
    population.enter(Member(1.0, tuple(reruns.keys_of(plan))))
    seen = set()
    for _ in range(300):
        copy = population.copied(repeats, len(problem.graph.operations), reruns.slots)
        assert copy is not None
        recomputations = reruns.schedule(copy).recomputations()
        seen.add(tuple(sorted(recomputations.items())))
    assert ((45, (30, 31)), (56, (21, 22))) in seen
    assert ((45, (30, 31)), (56, (21, 22)), (67, (12, 13))) in seen
    assert ((45, (30,)), (56, (21,))) in seen
    for each in seen:
        problem.evaluate(Schedule.with_recomputations(problem.graph, dict(each)))


def test_where_nothing_repeats_nothing_is_copied() -> None:
    population = Population(Random(0))
    population.enter(Member(1.0, tuple(range(0, 400, 7))))
    assert population.copied(Repeats(chain_of(list(range(1, 40)))), 39, SLOTS) is None
