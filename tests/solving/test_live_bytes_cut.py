"""What waits beside a run: the least bytes that cut values off from operations, and a bound on the peak."""

from __future__ import annotations

from functools import partial
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ir.graph import Phase, TrainingGraph
from planner.solving.live_bytes_cut import behind, least_cut
from planner.solving.peak_bounds import first_run_bytes, proven_peak
from planner.solving.peak_proof import Births
from tests.example_graphs import Builder
from tests.oracle import lowest, random_graph


def _depends(graph: TrainingGraph, wanted: set[int], operations: set[int], held: set[int]) -> bool:
    """Say whether making what is wanted, beside what is held, runs one of some operations."""
    left, seen = [u for u in wanted if u not in held], set[int]()
    while left:
        value = left.pop()
        if graph.producer[value] in operations:
            return True
        if value not in seen:
            seen.add(value)
            left += [u for u in graph.operations[graph.producer[value]].inputs if u not in held]
    return False


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_a_cut_is_the_least_that_must_be_held(seed: int, data: st.DataObject) -> None:
    graph, _ = random_graph(seed, operations=7, plain=seed % 2 == 0)
    sizes = [value.size_bytes for value in graph.values]
    values, operations = range(len(sizes)), range(len(graph.operations))
    out = data.draw(st.sets(st.sampled_from(operations), min_size=1, max_size=3))
    wanted = data.draw(st.sets(st.sampled_from(values), min_size=1, max_size=3))
    free = data.draw(st.sets(st.sampled_from(values), max_size=2))
    least = min(
        sum(sizes[u] for u in held if u not in free)
        for count in range(len(values) + 1)
        for held in combinations(values, count)
        if not _depends(graph, wanted, out, {*held, *free})
    )
    assert least_cut(graph, sizes, free, wanted, behind(graph, out))[0] == least


@settings(max_examples=200)
@given(seed=st.integers(0, 10**6))
def test_no_bound_by_what_waits_is_above_the_lowest_peak(seed: int) -> None:
    graph, costs = random_graph(seed, operations=7, plain=seed % 2 == 0)
    proof = Births(graph, costs, 0)
    for index, size_bytes in enumerate(first_run_bytes(graph, costs)):
        proof.before(index)
        proof.looks = 1000
        assert proof._by_cuts(proof.inputs[index], size_bytes) <= lowest(graph, costs)


def test_what_a_large_operation_made_waits_in_its_narrowest_form() -> None:
    """The other cannot run once that one's result is there, so what it made waits: 64 bytes of it are enough."""
    builder = Builder()
    (x,) = builder.add("x", [], [64])
    back = partial(builder.add, phase=Phase.BACKWARD)
    pooled = []
    for _ in range(2):
        (large,) = back("large", [x], [256])
        pooled += back("pool", [x, large], [128])
    (narrow,) = back("narrow", [pooled[0]], [64])
    (wide,) = back("widen", [narrow], [128])
    back("both", [wide, pooled[1]], [64])
    graph, costs = builder.graph("pools", {}), tuple(builder.costs)
    largest = max(first_run_bytes(graph, costs))
    proof = Births(graph, costs, 0)
    proof.before(len(graph.operations) - 1)
    proof.looks = 1000
    assert proof._by_cuts(frozenset((wide, pooled[1])), largest) == largest + 64 == lowest(graph, costs)
    assert proven_peak(graph, costs)[0] == largest + 64
