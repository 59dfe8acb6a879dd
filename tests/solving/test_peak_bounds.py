"""The lowest peak: no bound on it is above what some plan reaches."""

from __future__ import annotations

import pytest

from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.solving.peak_bounds import first_run_bytes, minimum_peak, proven_floor, proven_peak
from planner.solving.peak_proof import _SMALL, _STEPS, _Births
from tests.oracle import lowest, random_graph
from tests.tiers import tiered


@pytest.mark.parametrize("seed", tiered(range(300), quick=range(40)))
def test_no_bound_is_above_the_lowest_peak(seed: int) -> None:
    for plain in (False, True):
        graph, costs = random_graph(seed, operations=7, plain=plain)
        bound, where = proven_peak(graph, costs)
        assert proven_floor(graph, costs)[0] <= bound <= lowest(graph, costs)
        assert 0 <= where < len(graph.operations)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_not_followed_for_a_lower_bound_could_not_raise_it(seed: int) -> None:
    graph, costs = random_graph(seed, operations=7)
    needs_bytes = first_run_bytes(graph, costs)
    proof = _Births(graph, costs, _SMALL * max(needs_bytes))
    alone = []
    for index, size_bytes in enumerate(needs_bytes):
        proof.before(index)
        alone.append(proof.least_peak(size_bytes, steps=_STEPS))
    assert proven_peak(graph, costs) == (max(alone), alone.index(max(alone)))


def test_making_an_input_while_another_waits_counts() -> None:
    reads = [(), (0,), (1,), (2,), (3, 0)]
    sizes = [4, 1, 9, 1, 1]
    graph = TrainingGraph(
        operations=tuple(
            Operation(
                name=f"o{i}", key=f"o{i}", target="", inputs=inputs, outputs=(i,),
                phase=Phase.FORWARD if i < 4 else Phase.BACKWARD,
            )
            for i, inputs in enumerate(reads)
        ),
        values=tuple(Value(name=f"v{i}", size_bytes=size) for i, size in enumerate(sizes)),
    )  # fmt: skip
    costs = (OperationCost(seconds=1.0),) * len(reads)
    assert proven_floor(graph, costs)[0] == 10
    floor = minimum_peak(graph, costs)
    assert floor.proven_peak_bytes == lowest(graph, costs) == floor.found_peak_bytes


def test_a_step_without_operations_needs_nothing() -> None:
    assert proven_peak(TrainingGraph(operations=(), values=()), ()) == (0, 0)
