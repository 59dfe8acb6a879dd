"""Places where few bytes cross the forward, and segments between them, about square-root many (Chen et al. 2016)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from planner.ir.graph import Phase, TrainingGraph
from planner.ir.schedule import Schedule, recompute_lazily


def turning_point(graph: TrainingGraph) -> int:
    """Return the first operation after the forward."""
    after = (index for index, operation in enumerate(graph.operations) if operation.phase is not Phase.FORWARD)
    return next(after, len(graph.operations))


def last_forward_readers(graph: TrainingGraph, turn: int) -> list[int]:
    """For each value, the last operation of the forward that reads it, or -1."""
    return [max((reader for reader in readers if reader < turn), default=-1) for readers in graph.readers]


def crossing_bytes(graph: TrainingGraph, turn: int) -> list[int]:
    """For each operation of the forward, the bytes made up to it that the rest of the forward reads."""
    change = [0] * turn
    for u, last in enumerate(last_forward_readers(graph, turn)):
        maker = graph.producer[u]
        if maker < last:
            change[maker] += graph.values[u].size_bytes
            change[last] -= graph.values[u].size_bytes
    return list(accumulate(change))


def narrow_places(crossing: list[int]) -> list[int]:
    """Return the operations after which few bytes cross, compared with their surroundings.

    What crosses everywhere (masks, position tables) raises all places alike and so changes nothing.
    """
    narrow = [
        place
        for place in range(1, len(crossing) - 1)
        if crossing[place] <= crossing[place - 1] and crossing[place] < crossing[place + 1]
    ]
    if not narrow:
        return list(range(1, len(crossing) - 1))
    tolerance = (max(crossing) - min(crossing[place] for place in narrow)) / 4
    reach = max(1, len(crossing) // 8)
    return [
        place
        for place in narrow
        if crossing[place] <= min(crossing[other] for other in narrow if abs(other - place) <= reach) + tolerance
    ]


def chain_places(graph: TrainingGraph, *, minor_share: float = 0.0) -> list[int]:
    """Return the operations after which the forward can be cut into the stages of a chain.

    One value crosses such a place, and no other chosen one. Values that live through half of the
    forward do not count: masks, position tables, outermost skip connections. Nor do those up to a minor
    share of the largest at a place: the chain is finer then, and keeps what it passes over. A graph
    without such places is cut at its narrow ones. O(values + crossing values at all places).
    """
    turn = turning_point(graph)
    begins: list[list[int]] = [[] for _ in range(turn)]
    ends: list[list[int]] = [[] for _ in range(turn)]
    for u, last in enumerate(last_forward_readers(graph, turn)):
        maker = graph.producer[u]
        if maker < last and graph.values[u].size_bytes and last - maker <= max(turn // 2, 1):
            begins[maker].append(u)
            ends[last].append(u)
    across: list[frozenset[int]] = []
    live: set[int] = set()
    for index in range(turn):
        live.difference_update(ends[index])
        live.update(begins[index])
        largest = max((graph.values[u].size_bytes for u in live), default=0)
        across.append(frozenset(u for u in live if graph.values[u].size_bytes > minor_share * largest))
    single = [place for place in range(turn - 1) if len(across[place]) == 1]
    chosen: list[int] = []
    for place in single or [place for place in narrow_places(crossing_bytes(graph, turn)) if across[place]]:
        if not chosen or across[place].isdisjoint(across[chosen[-1]]):
            chosen.append(place)
    return chosen


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
    return sorted((n for n in counts if 2 <= n <= places + 1), key=lambda n: abs(math.log(n / root)))


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
