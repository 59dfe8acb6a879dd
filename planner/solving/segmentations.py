"""Segments of the forward with saved boundaries, about square-root many (Chen et al. 2016)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from planner.ir.cut_points import crossing_bytes, narrow_places, turning_point
from planner.ir.graph import TrainingGraph
from planner.ir.schedule import Schedule, recompute_lazily


def segmentations(graph: TrainingGraph) -> Iterator[Schedule]:
    """Return the schedule without recompute, then segmented ones, those near the square root first.

    A graph whose forward has no narrow places just gets expensive boundaries.
    """
    yield Schedule.keep_all(graph)
    if not graph.operations:
        return
    turn = turning_point(graph)
    crossing, before = crossing_bytes(graph, turn), _saved_before(graph, turn)
    seen: set[tuple[int, ...]] = set()
    # Where sizes shrink along the forward, as in a CNN, the narrow places leave its start uncut.
    for candidates in (narrow_places(crossing), list(range(1, turn - 1))):
        for count in _counts(len(candidates)):
            places = _boundaries(crossing, before, candidates, count)
            if not places or places in seen:
                continue
            seen.add(places)
            for keeps_last in (True, False):
                yield _segmented(graph, turn, places, keeps_last=keeps_last)


def _counts(places: int) -> list[int]:
    """Return numbers of segments to try, those near the square root first."""
    root = max(2.0, math.sqrt(places + 1))
    counts = {2, 3, *(round(root * factor) for factor in (0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8))}
    return sorted(
        (count for count in counts if 2 <= count <= places + 1), key=lambda count: abs(math.log(count / root))
    )


def _saved_before(graph: TrainingGraph, turn: int) -> list[int]:
    """Return the cumulative bytes of saved activations after each forward operation."""
    saved = [0] * turn
    for u, maker in enumerate(graph.producer):
        if maker < turn and graph.readers[u] and graph.readers[u][-1] >= turn:
            saved[maker] += graph.values[u].size_bytes
    return list(accumulate(saved))


def _boundaries(crossing: list[int], before: list[int], narrow: list[int], count: int) -> tuple[int, ...]:
    """Choose the narrow places that divide the saved activations into about equal segments."""
    total = before[-1]
    window = total / count / 2
    chosen: set[int] = set()
    for number in range(1, count):
        target = total * number / count
        near = [place for place in narrow if abs(before[place] - target) <= window]
        if near:
            chosen.add(min(near, key=lambda place: (crossing[place], abs(before[place] - target))))
    return tuple(sorted(chosen))


def _segmented(graph: TrainingGraph, turn: int, places: tuple[int, ...], *, keeps_last: bool) -> Schedule:
    """Drop, after the forward, all values that are no boundary of a segment."""
    dropped = []
    for u, maker in enumerate(graph.producer):
        if maker >= turn or not graph.operations[maker].recomputable or (keeps_last and maker > places[-1]):
            continue
        readers = graph.readers[u]
        last = readers[bisect_left(readers, turn) - 1] if readers and readers[0] < turn else -1
        place = bisect_left(places, maker)
        if place == len(places) or places[place] >= last:
            dropped.append(u)
    return recompute_lazily(graph, {turn: dropped})
