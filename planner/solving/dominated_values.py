"""Values that no cheapest plan need hold: what they are for can be held in their place, and takes no more.

A value that one operation reads and nothing else, which reads nothing else that may be gone, is worth no more than what
that operation makes of it. Where a plan holds the value, let it make the results at once and hold them: they take
no more bytes, and nothing runs more often. So programmes need not ask at which cuts such values are held. Where the
maker is for nothing else either, both run again together, and one column stands for both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from planner.ir.graph import TrainingGraph


@dataclass(frozen=True, slots=True)
class Passing:
    """A value that is never held between the first run of its reader and the end of the step."""

    value: int
    maker: int
    reader: int
    results: tuple[int, ...]
    """What is held in its place."""
    together: bool
    """Whether the maker runs again only with the reader."""


def passing_values(graph: TrainingGraph, apart: Collection[int] = ()) -> list[Passing]:
    """Return these values, by their makers, but for those of operations whose runs are moments themselves.

    The results may then be made earlier than they were: other moments than first runs of the base order, and those at
    which operations ``apart`` run again, may take more. O(operations + reads).
    """
    return [each for value in range(len(graph.values)) if (each := _passing(graph, value, apart)) is not None]


def _passing(graph: TrainingGraph, value: int, apart: Collection[int]) -> Passing | None:
    operations, readers, maker = graph.operations, graph.readers[value], graph.producer[value]
    if len(readers) != 1 or not may_go(graph, value):
        return None
    runs = operations[maker], operations[readers[0]]
    if any(not run.recomputable or run.state_bytes for run in runs) or maker in apart or readers[0] in apart:
        return None
    if any(u != value and may_go(graph, u) for u in runs[1].inputs):
        return None
    results = [u for u in runs[1].outputs if may_go(graph, u)]
    if sum(graph.values[u].size_bytes for u in results) > graph.values[value].size_bytes:
        return None
    together = all(u == value or not may_go(graph, u) for u in runs[0].outputs)
    return Passing(value, maker, readers[0], tuple(results), together)


def may_go(graph: TrainingGraph, value: int) -> bool:
    """Say whether a value takes bytes that a plan need not hold: it is read again, and does not stay anyway."""
    return bool(graph.values[value].size_bytes and graph.readers[value]) and not graph.values[value].retained
