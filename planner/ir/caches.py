"""What of a step's reads a processor's cache still holds: what was touched longest ago leaves first.

An operation that is timed alone reads all from a cache or nothing. In a step that depends on what runs before it, so
on the schedule: a tighter budget recomputes what is then read at once, and a recompute may read what was saved long
ago. Results count as written where something was just freed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace

from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.schedule import Schedule

CACHE_BYTES = 32 << 20
"""What cores of common processors share."""

_AGAIN = 0.5
"""How much a recompute loses of what a first run does: of 33 plans on a CPU, 30 were then within 3 points of the clock,
28 with all of it and 30 with none, by 1.4, 1.6 and 1.5 points in the mean."""


class _Cache:
    """What is held, by name, and in the order in which it was touched last."""

    def __init__(self) -> None:
        self.held: OrderedDict[Hashable, int] = OrderedDict()
        self.free_bytes = CACHE_BYTES

    def touch(self, name: Hashable, size_bytes: int) -> int:
        """Read or write something, and return how much of it was not there."""
        there = self.held.pop(name, 0)
        self.held[name] = min(size_bytes, CACHE_BYTES)
        self.free_bytes += there - self.held[name]
        while self.free_bytes < 0:
            self.free_bytes += self.held.popitem(last=False)[1]
        return max(0, size_bytes - there)


def cold_shares(graph: TrainingGraph, order: Sequence[int]) -> list[float]:
    """Return for each run how much of what it touches it must read from memory, in O(runs + reads)."""
    cache, shares = _Cache(), []
    for position, index in enumerate(order):
        operation = graph.operations[index]
        reads = [(value, graph.values[value].size_bytes) for value in dict.fromkeys(operation.inputs)]
        writes = [(value, graph.values[value].size_bytes) for value in operation.outputs]
        known_bytes = sum(size_bytes for _, size_bytes in (*reads, *writes))
        resident_bytes = max(0, operation.moved_bytes - known_bytes)  # parameters and inputs: long ago, if at all
        cold_bytes = sum(cache.touch(*read) for read in (*reads, (("resident", position), resident_bytes)))
        for write in writes:
            cache.touch(*write)
        shares.append(cold_bytes / (known_bytes + resident_bytes or 1))
    return shares


def in_base_order(graph: TrainingGraph, costs: Sequence[OperationCost]) -> tuple[OperationCost, ...]:
    """Return costs whose first runs find in a cache what the step without recompute leaves there."""
    if not any(cost.cold_seconds for cost in costs):
        return tuple(costs)
    shares = cold_shares(graph, range(len(costs)))
    return tuple(replace(cost, cold_share=share) for cost, share in zip(costs, shares, strict=True))


def seconds_more(graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule) -> float:
    """Return how much longer a schedule takes than its runs cost, since it finds less in a cache; negative for more."""
    if not any(cost.cold_seconds for cost in costs):
        return 0.0
    seconds, ran = 0.0, set[int]()
    for index, share in zip(schedule.order, cold_shares(graph, schedule.order), strict=True):
        cost = costs[index]
        seconds += cost.cold_seconds * (_AGAIN * share if index in ran else share - cost.cold_share)
        ran.add(index)
    return seconds
