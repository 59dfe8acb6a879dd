"""What a compiler computes inside one kernel is one operation, and is never in memory."""

from __future__ import annotations

import random

import pytest

from planner.ir.graph import Phase, TrainingGraph
from planner.ir.in_place import InPlace, fused
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from tests.example_graphs import Builder
from tests.oracle import random_graph

SEEDS = range(120)


def random_kernels(seed: int) -> tuple[TrainingGraph, InPlace, frozenset[int]]:
    graph, _ = random_graph(seed, operations=14)
    draw = random.Random(seed)
    written = frozenset(index for index in range(len(graph.operations)) if draw.random() < 0.7)
    return graph, fused(graph, written), written


@pytest.mark.parametrize("seed", SEEDS)
def test_a_schedule_of_kernels_is_one_of_their_parts(seed: int) -> None:
    graph, found, written = random_kernels(seed)
    _, costs = random_graph(seed, operations=14)
    assert sorted(part for parts in found.parts for part in parts) == list(range(len(graph.operations)))
    schedule = Schedule.keep_all(found.graph)
    evaluation = simulate(found.graph, found.costs(costs), schedule)
    single = simulate(graph, costs, found.carried_out(schedule))
    assert evaluation.seconds == pytest.approx(single.seconds)
    for parts in found.parts:
        assert len(parts) == 1 or written.issuperset(parts)
        assert len({graph.operations[part].phase for part in parts}) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_only_what_nobody_else_reads_is_inside(seed: int) -> None:
    graph, found, _ = random_kernels(seed)
    kernel = {part: index for index, parts in enumerate(found.parts) for part in parts}
    for value in set(range(len(graph.values))) - set(found.values):
        assert not graph.values[value].retained
        assert {kernel[reader] for reader in graph.readers[value]} <= {kernel[graph.producer[value]]}


def test_random_graphs_have_something_to_join() -> None:
    joins = [max(map(len, random_kernels(seed)[1].parts)) for seed in SEEDS]
    assert sum(size > 1 for size in joins) > 0.3 * len(joins) and max(joins) > 2


def chain(between: str, *, phase: Phase = Phase.FORWARD, retained: bool = False) -> list[tuple[str, ...]]:
    """Return which operations are one, of two that a compiler writes with something in between."""
    b = Builder()
    (x,) = b.add("given", [], [64])
    (y,) = b.add("first", [x], [64], retained=retained)
    b.add(between, [x], [64])
    b.add("last", [y], [64], phase=phase)
    graph = TrainingGraph(operations=tuple(b.operations), values=tuple(b.values))
    written = {i for i, operation in enumerate(graph.operations) if operation.target in ("first", "last", "plain")}
    found = fused(graph, written)
    return [tuple(graph.operations[part].target for part in parts) for parts in found.parts]


def test_an_operation_is_computed_where_it_is_read() -> None:
    assert ("first", "last") in chain("plain")
    assert ("first", "last") not in chain("library"), "what is in between would find it in memory"
    assert ("first", "last") not in chain("plain", phase=Phase.BACKWARD), "what is saved is in memory"
    assert ("first", "last") not in chain("plain", retained=True)


def test_a_kernel_runs_where_its_result_is_made() -> None:
    b = Builder()
    (x,) = b.add("given", [], [640])
    (y,) = b.add("cos", [x], [640])
    (z,) = b.add("product", [x], [64])
    b.add("sum", [y, z], [64])
    graph = TrainingGraph(operations=tuple(b.operations), values=tuple(b.values))
    found = fused(graph, {1, 2, 3})
    assert found.parts == ((0,), (1, 2, 3))
    assert found.graph.operations[-1].keys == ("|cos|forward+0", "|product|forward+0", "|sum|forward+0")
    assert [found.graph.values[u].size_bytes for u in found.graph.operations[-1].outputs] == [64]
