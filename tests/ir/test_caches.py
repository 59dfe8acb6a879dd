"""What a step's reads find in a cache, by the schedule."""

from __future__ import annotations

from planner.ir.caches import CACHE_BYTES, cold_shares, in_base_order, seconds_more
from planner.ir.graph import Operation, OperationCost, TrainingGraph, Value
from planner.ir.schedule import Schedule

HALF = CACHE_BYTES // 2


def graph() -> TrainingGraph:
    """Return a step that makes ``a`` and ``b`` and reads first the second and then the first, as backwards do."""
    operations = tuple(
        Operation(name=name, key=f"|{name}|f0", target=name, inputs=reads, outputs=makes)
        for name, reads, makes in (("a", (), (0,)), ("b", (0,), (1,)), ("of b", (1,), (2,)), ("of a", (0,), (3,)))
    )
    values = tuple(Value(name=str(index), size_bytes=HALF) for index in range(4))
    return TrainingGraph(operations=operations, values=values)


def test_what_was_touched_longest_ago_is_read_from_memory_and_what_was_recomputed_from_a_cache() -> None:
    assert cold_shares(graph(), range(4)) == [0.0, 0.0, 0.0, 0.5]
    assert cold_shares(graph(), (0, 1, 2, 0, 3)) == [0.0, 0.0, 0.0, 0.0, 0.0]
    assert cold_shares(graph(), (0, 1, 2, 1, 3)) == [0.0, 0.0, 0.0, 0.5, 0.0]


def test_a_schedule_takes_longer_by_what_it_finds_less_of() -> None:
    costs = in_base_order(graph(), (OperationCost(seconds=1.0, cold_seconds=1.0),) * 4)
    assert [cost.first_seconds for cost in costs] == [1.0, 1.0, 1.0, 1.5]
    orders = {(0, 1, 2, 3): 0.0, (0, 1, 2, 0, 3): -0.5, (0, 1, 2, 1, 3): 0.25 - 0.5}
    assert {order: seconds_more(graph(), costs, Schedule(order)) for order in orders} == orders
