"""Operations that write over an input are one with what made it, and need exactly what their parts need in turn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import pytest

from planner.errors import ScheduleError
from planner.ir.graph import OperationCost, Phase, TrainingGraph, Value
from planner.ir.in_place import InPlace, joined
from planner.ir.schedule import Schedule, recompute_lazily
from planner.ir.simulator import lifetimes, simulate
from tests.example_graphs import Builder
from tests.oracle import random_graph

SEEDS = range(120)


def overwriting(seed: int) -> tuple[TrainingGraph, tuple[OperationCost, ...], dict[int, tuple[int, ...]]]:
    """Return a random graph in which many operations may write over an input, none of which needs workspace."""
    graph, costs = random_graph(seed, operations=12)
    draw = random.Random(seed)
    values = list(graph.values)
    may: dict[int, tuple[int, ...]] = {}
    for index, operation in enumerate(graph.operations):
        if len(operation.outputs) == 1 and operation.inputs and draw.random() < 0.8:
            may[index] = tuple(draw.sample(operation.inputs, len(operation.inputs)))
            values[operation.outputs[0]] = replace(
                values[operation.outputs[0]], size_bytes=values[may[index][0]].size_bytes
            )
    costs = tuple(replace(cost, workspace_bytes=0) if index in may else cost for index, cost in enumerate(costs))
    return replace(graph, values=tuple(values)), costs, may


@pytest.mark.parametrize("seed", SEEDS)
def test_what_must_run_before_a_joined_operation_still_does(seed: int) -> None:
    graph, costs, may = overwriting(seed)
    draw = random.Random(seed)
    later = [index for index in range(2, len(graph.operations)) if draw.random() < 0.5]
    runs_after = {index: tuple(sorted(draw.sample(range(index), 2))) for index in later}
    found = joined(replace(graph, runs_after=runs_after), may, costs)
    place = {part: (index, nth) for index, parts in enumerate(found.parts) for nth, part in enumerate(parts)}
    assert all(place[before] < place[index] for index, earlier in runs_after.items() for before in earlier)


def peak_in_turn(
    graph: TrainingGraph, costs: tuple[OperationCost, ...], schedule: Schedule, over: Mapping[int, int]
) -> int:
    """Run single operations in turn, each result in the place of what it is written over."""
    change = [0] * (len(schedule.order) + 1)
    for copy in lifetimes(graph, schedule):
        change[copy.born] += graph.values[copy.value].size_bytes
        change[copy.died + 1] -= graph.values[copy.value].size_bytes
    peak = 0
    kept = {index: schedule.order.index(index) for index in set(schedule.order)}
    last = {index: position for position, index in enumerate(schedule.order)}
    for position, (index, live_bytes) in enumerate(zip(schedule.order, accumulate(change), strict=False)):
        saved_bytes = graph.values[over[index]].size_bytes if index in over else 0
        states = (graph.operations[i].state_bytes for i in kept if kept[i] < last[i] and kept[i] <= position <= last[i])
        peak = max(peak, live_bytes - saved_bytes + costs[index].workspace_bytes + sum(states))
    return peak


def random_schedule(graph: TrainingGraph, seed: int) -> Schedule:
    """Drop values at random, and make them again where they are read."""
    draw = random.Random(seed)
    free = [u for u, maker in enumerate(graph.producer) if graph.operations[maker].recomputable]
    dropped = {
        step: [u for u in free if graph.producer[u] < step and draw.random() < 0.3]
        for step in range(len(graph.operations))
    }
    try:
        return recompute_lazily(graph, dropped)
    except ScheduleError:
        return Schedule.keep_all(graph)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_peak_is_that_of_the_parts_in_turn(seed: int) -> None:
    graph, costs, may = overwriting(seed)
    found = joined(graph, may, costs)
    schedule = random_schedule(found.graph, seed)
    evaluation = simulate(found.graph, found.costs(costs), schedule)
    single = found.carried_out(schedule)
    assert evaluation.peak_bytes == peak_in_turn(graph, costs, single, found.over)
    assert evaluation.seconds == pytest.approx(simulate(graph, costs, single).seconds)
    assert evaluation.peak_bytes <= simulate(graph, costs, single).peak_bytes


def test_random_graphs_have_something_to_join() -> None:
    joins = [len(joined(graph, may, costs).over) for graph, costs, may in map(overwriting, SEEDS)]
    assert sum(map(bool, joins)) > 0.3 * len(joins) and max(joins) > 2


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_written_over_that_somebody_needs(seed: int) -> None:
    graph, costs, may = overwriting(seed)
    found = joined(graph, may, costs)
    for index, value in found.over.items():
        assert value in may[index]
        assert graph.readers[value] == (index,) and not graph.values[value].retained
        assert graph.operations[graph.producer[value]].phase is graph.operations[index].phase
    assert sorted(part for parts in found.parts for part in parts) == list(range(len(graph.operations)))


def backward(other_bytes: int, *, made_before: bool, given_bytes: int = 64) -> InPlace:
    """Return a backward whose second operation may write over the first one's result, and reads something else."""
    b = Builder()
    (x,) = b.add("given", [], [given_bytes], recomputable=False)
    (other,) = b.add("wide", [x], [other_bytes])
    b.add("loss", [x], [64], phase=Phase.LOSS, recomputable=False)
    if made_before:
        (other,) = b.add("wide", [x], [other_bytes], phase=Phase.BACKWARD)
    (g,) = b.add("product", [x], [640], phase=Phase.BACKWARD)
    b.add("activation", [g, other], [640], phase=Phase.BACKWARD)
    graph = TrainingGraph(operations=tuple(b.operations), values=tuple(b.values))
    return joined(graph, {len(b.operations) - 1: (g,)}, b.costs)


def test_operations_are_joined_where_that_needs_no_more_than_both_in_turn() -> None:
    assert backward(640, made_before=False).over, "640 bytes of each are needed by the activation anyway"
    between = backward(6400, made_before=False, given_bytes=6400)
    assert not between.over, "what is made again in between would be there before"


def test_what_the_backward_has_made_waits_there_anyway() -> None:
    assert backward(6400, made_before=True).over


def test_names_sizes_and_work_are_those_of_all_parts() -> None:
    found = backward(640, made_before=False)
    operation = found.graph.operations[-1]
    assert operation.target == "product" and [key.split("|")[1] for key in operation.keys] == ["product", "activation"]
    assert operation.then == ((operation.keys[1], 0),)
    assert [found.graph.values[u] for u in operation.outputs] == [Value(name="v4", size_bytes=640)]
    assert operation.flops == 2 * 10**9 and found.values == (0, 1, 2, 4)
