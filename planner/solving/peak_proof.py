"""A lower bound on the peak of any plan in a step's order, recompute included.

While an operation first runs, what it reads is there. One of these values was born last, in a run of its maker: while
that ran, the others were there already, beside what the maker reads and makes. The same holds of what was there then,
and so on, back to nothing. A plan chooses which value is born last each time; the bound is the least that its highest
moment can be, whatever it chooses. In the words of pebble games (Sethi, "Complete register allocation problems", SIAM
Journal on Computing 4, 1975) that is how many bytes of pebbles an operation's inputs need.

There are as many choices as sets of values, so most must not be looked at. What is made of fewer values needs no more:
whatever a plan does for all of them it may do for some. So a set can stand for a larger one, and the bound holds:

- A value that can be made again from the others, within the peak so far, is left out: nothing is lost by that.
- Two of the values alone may need more than the peak so far; then so do all.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, islice

from planner.ir.graph import OperationCost, TrainingGraph
from planner.solving.recompute_search import RecomputeSearch, set_of

_LOOKS_PER_OPERATION, _MOST_LOOKS, _SHARES = 500, 160_000, (0.01, 0.3)
"""Sets that are looked at, for each operation and at most; and of what is left of them for one operation, at
first and where that did not do: always the same work. A look takes about twenty microseconds. Until each value that may
be made again counted as a look, and what one operation took beyond its share, 5,188 operations of an LSTM took 20 s."""

_LOOKS_FOR_TWO = 150
"""Sets that are looked at to know what two values need."""

_SMALL = 1e-3
"""Values of less than this share of what one operation needs are left out where births are followed."""

Live = frozenset[int]


def proven_by_last_births(
    graph: TrainingGraph, costs: Sequence[OperationCost], first_run_bytes: Sequence[int]
) -> tuple[int, int]:
    """Return a lower bound on the peak of any plan and the operation that binds, within a limit of work.

    ``first_run_bytes`` is what must be there while each operation first runs, whatever a plan does. If the work does
    not do for some operations, the bound is a lower one.
    """
    best = max(((size_bytes, -index) for index, size_bytes in enumerate(first_run_bytes)), default=(0, 0))
    proof = Births(graph, costs, _SMALL * best[0])
    looks = min(_LOOKS_PER_OPERATION * len(first_run_bytes), _MOST_LOOKS)
    left = list(range(len(first_run_bytes)))
    for share in _SHARES:
        again: list[int] = []
        for index in left:
            if looks <= 0:
                break
            proof.before(index)
            proof.looks = given = int(share * looks)
            least_bytes = max(first_run_bytes[index], best[0])
            peak_bytes = proof.least(proof.inputs[index], least_bytes, proof.looks, by_pairs=True)
            if peak_bytes > best[0]:
                best = peak_bytes, -index
            looks -= given - proof.looks
            if proof.looks <= 0:
                again.append(index)
        # What had to wait while the operation ran that binds so far is read soon after it.
        left = sorted(again, key=lambda index: (index < -best[1], index))
    return best[0], -best[1]


class Births:
    """Follows the last births of live values back from the first run of an operation."""

    def __init__(self, graph: TrainingGraph, costs: Sequence[OperationCost], least_bytes: float) -> None:
        self.graph, self.costs = graph, costs
        self.producer = graph.producer
        self.sizes = [value.size_bytes for value in graph.values]
        self.last_reader = [readers[-1] if readers else -1 for readers in graph.readers]
        self.inputs = [frozenset(u for u in o.inputs if self.sizes[u] > least_bytes) for o in graph.operations]
        self.outputs = [frozenset(operation.outputs) for operation in graph.operations]
        self.touched = [frozenset((*operation.inputs, *operation.outputs)) for operation in graph.operations]
        made = [sum(self.sizes[u] for u in o.outputs if graph.values[u].retained) for o in graph.operations]
        self.retained_bytes = list(accumulate(made))
        """Up to and with each operation."""
        self.irreplaceable = [
            u
            for u, maker in enumerate(self.producer)
            if self.sizes[u] > least_bytes and not graph.values[u].retained and not graph.operations[maker].recomputable
        ]
        """By their makers."""
        self.irreplaceable.sort(key=self.producer.__getitem__)
        self.beside_bytes = [0 if value.retained else value.size_bytes for value in graph.values]
        """What each value takes beside those that are retained, and those that stand."""
        self.search = RecomputeSearch(graph, costs)
        self.left_out = set_of(u for u, size_bytes in enumerate(self.sizes) if size_bytes <= least_bytes)
        self.looks = 0
        """How many more sets are looked at."""
        self._stand(())

    def before(self, index: int) -> None:
        """Start from an operation: values that are read later and never recomputed stay live from their first run."""
        standing = tuple(u for u in self.irreplaceable if self.last_reader[u] > index)
        if standing != self.standing:
            for u in self.standing:
                self.beside_bytes[u] = self.sizes[u]
            self._stand(standing)

    def _stand(self, standing: tuple[int, ...]) -> None:
        """Set the values that are live throughout, and clear the memo of other sets."""
        self.standing = standing
        for u in standing:
            self.beside_bytes[u] = 0
        self.makers = [self.producer[u] for u in standing]
        self.standing_bytes = [0, *accumulate(self.sizes[u] for u in standing)]
        self.beside = self.left_out | set_of(standing)
        """What is there without being in any set."""
        self.pairs: dict[tuple[int, int], tuple[int, int]] = {}
        """What two values need at least, and the peak at which that was asked."""

    def least(self, start: Live, peak_bytes: int, looks: int, *, by_pairs: bool) -> int:
        """Return the least peak of a set of live values, within a number of steps; its pairs may be asked first.

        The lowest so far come first; of those that are as low, the ones that are nearest to nothing. The method is
        Dijkstra's, with the highest of a way in place of its length.
        """
        queue: list[tuple[int, int, int, Live]] = [(peak_bytes, 0, 0, start)]
        seen = {start: peak_bytes}
        number = 0
        last = self.looks - looks
        while True:
            peak, _, _, live = heapq.heappop(queue)
            if peak > seen[live]:
                continue
            if (fewer := self._simplest(live, peak)) != live:
                if seen.get(fewer, peak + 1) <= peak:
                    continue
                seen[fewer] = peak
                live = fewer
            if not live or self.looks <= last:
                return peak
            self.looks -= 1
            if by_pairs and (needed := self._by_pairs(live, peak)) > peak:
                seen[live] = needed
                number += 1
                heapq.heappush(queue, (needed, len(live), number, live))
                continue
            for size_bytes, earlier in self.births(live):
                highest = max(peak, size_bytes)
                if highest < seen.get(earlier, highest + 1):
                    seen[earlier] = highest
                    number += 1
                    near = sum(map(self.beside_bytes.__getitem__, earlier))
                    heapq.heappush(queue, (highest, near, number, earlier))

    def births(self, live: Live) -> Iterator[tuple[int, Live]]:
        """Return, for each run that may have produced one of these values last, the sets live in it and before it.

        By then all of this had been made once, and so had all that came before the last of its makers.
        """
        makers = {self.producer[u] for u in live}
        size_of = self.beside_bytes.__getitem__
        live_bytes = self._standing_bytes(max(makers)) + sum(map(size_of, live))
        for maker in makers:
            more_bytes = sum(map(size_of, self.touched[maker] - live)) + self.costs[maker].workspace_bytes
            yield live_bytes + more_bytes, live.difference(self.outputs[maker]) | self.inputs[maker]

    def _standing_bytes(self, ran: int) -> int:
        """Return the bytes live throughout once an operation has run."""
        return self.retained_bytes[ran] + self.standing_bytes[bisect_right(self.makers, ran)]

    def _by_pairs(self, live: Live, peak_bytes: int) -> int:
        """Return the larger of a peak and the least peak of any two of these values."""
        if len(live) == 2:
            return peak_bytes
        for pair in combinations(sorted(live), 2):
            needed, asked = self.pairs.get(pair, (0, -1))
            if needed <= peak_bytes and asked < peak_bytes:
                needed = self.least(frozenset(pair), peak_bytes, min(_LOOKS_FOR_TWO, self.looks), by_pairs=False)
                self.pairs[pair] = needed, peak_bytes
            if needed > peak_bytes:
                return needed
        return peak_bytes

    def _simplest(self, live: Live, peak_bytes: int) -> Live:
        live = self._without_what_can_be_made(live, peak_bytes)
        while live and (earlier := self._earlier(live, peak_bytes)) is not None:
            live = earlier
        return live

    def _earlier(self, live: Live, peak_bytes: int) -> Live | None:
        """Return values that may be held instead of those of one operation, since their last birth.

        It is made of what that run reads, is no more than they, and nothing else is made of them.
        """
        size_of = self.beside_bytes.__getitem__
        makers = {self.producer[u] for u in live}
        live_bytes = self._standing_bytes(max(makers)) + sum(map(size_of, live))
        for maker in sorted(makers, reverse=True):
            made = live & self.outputs[maker]
            if any(self._can_help(made, u) for u in live - made):
                continue
            touched_bytes = sum(map(size_of, self.touched[maker] - live))
            if live_bytes + touched_bytes + self.costs[maker].workspace_bytes > peak_bytes:
                continue
            self.looks -= 1
            earlier = self._without_what_can_be_made((live - made) | self.inputs[maker], peak_bytes)
            if sum(map(size_of, (earlier & self.inputs[maker]) - live)) <= sum(map(size_of, made)):
                return earlier
        return None

    def _without_what_can_be_made(self, live: Live, peak_bytes: int) -> Live:
        """Drop, one by one, values that can be recomputed from the others, or from scratch, within a peak."""
        size_of = self.beside_bytes.__getitem__
        while live:
            by_makers = sorted(live, key=self.producer.__getitem__)
            free_bytes = peak_bytes - self._standing_bytes(self.producer[by_makers[-1]]) - sum(map(size_of, live))
            made = [u for u in by_makers if self.search.can_be_made_alone(u, self.beside, free_bytes + size_of(u))]
            if not made:
                ways = ((u, live - {u}) for u in reversed(by_makers))
                made = [*islice((u for u, held in ways if self._can_be_made(u, held, free_bytes + size_of(u))), 1)]
            if not made:
                break
            live = live.difference(made)
        return live

    def _can_help(self, held: Live, value: int) -> bool:
        """Whether a value is computed from others, or together with them."""
        helps = self.search.can_help[self.producer[value]]
        return any(helps >> u & 1 for u in held)

    def _can_be_made(self, value: int, held: Live, room_bytes: int) -> bool:
        """Whether a value is known to be recomputable from others, which stay live, in so many further bytes."""
        before = self.search.looks
        found = self.search.can_be_made(value, set_of(held) | self.beside, room_bytes)
        self.looks -= 1 + self.search.looks - before
        return found
