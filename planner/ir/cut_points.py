"""Places where few bytes cross the forward, at which it can be cut into stages."""

from __future__ import annotations

from itertools import accumulate

from planner.ir.graph import Phase, TrainingGraph


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
