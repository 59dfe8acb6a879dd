"""Find which operations to recompute, and in which order, to have a value again beside others that stay live.

Go back from what is wanted. Of what is there at some moment one value was made last; before that run there was the
rest, and what the run reads. So from set to set, until all of one is there already. A set stands for a larger one where
the rest of that can be made after it: values that can be made from nothing, beside the others, come last. That is how
pebble games are played backwards (Sethi, "Complete register allocation problems", SIAM Journal on Computing 4, 1975).

Sets of values are bits of an integer here.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from planner.ir.graph import OperationCost, TrainingGraph

_MORE_ROOM = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
"""How much more than the values need from which it is made a value may need, as shares of that: what is tried."""

_LOOKS_FOR_ROOM, _LOOKS_FOR_A_SET = 15, 60
"""Sets that are looked at in each of two orders: for each of those tries; on the way to a set."""

_MANY_LOOKS = 60_000
"""From then on only the last of those shares is tried: a look takes about twenty microseconds."""

_RUNS_AT_MOST = 3
"""How many runs make a value again at most, for each operation of the step."""

_SMALL = 1e-4
"""Values of less than this share of the largest stay from one use to the next, and are not looked at."""

_REMEMBERED = 1 << 16
"""Sets of which it is remembered how many bytes they take."""

_NEVER = 1 << 62


class _NoWay(Exception):
    """No way to recompute a value was found."""


class RecomputeSearch:
    """Search for the operations that recompute a value beside others that stay live."""

    def __init__(self, graph: TrainingGraph, costs: Sequence[OperationCost]) -> None:
        self.graph = graph
        self.producer = graph.producer
        self.sizes = [0 if value.retained else value.size_bytes for value in graph.values]
        """Beside what is retained."""
        least_bytes = _SMALL * max(self.sizes, default=0)
        retained = set_of(u for u, value in enumerate(graph.values) if value.retained and graph.readers[u])
        self.counts = retained | set_of(u for u, size_bytes in enumerate(self.sizes) if size_bytes > least_bytes)
        """The values that sets are of."""
        self.inputs = [set_of(operation.inputs) & self.counts for operation in graph.operations]
        self.outputs = [set_of(operation.outputs) & self.counts for operation in graph.operations]
        self.own_bytes = [
            cost.workspace_bytes
            + sum(graph.values[u].size_bytes for u in operation.outputs if graph.values[u].retained)
            for cost, operation in zip(costs, graph.operations, strict=True)
        ]
        """What each operation takes beside the values that it touches, where it runs again."""
        self.can_help = list[int]()
        """What each operation is made of, and its outputs."""
        for index, operation in enumerate(graph.operations):
            helps = self.inputs[index] | self.outputs[index]
            for u in operation.inputs:
                helps |= self.can_help[self.producer[u]]
            self.can_help.append(helps)
        self.lasting = [0]
        """What no plan makes again or need make again, of the first so many operations."""
        for index, operation in enumerate(graph.operations):
            stays = retained if operation.recomputable else -1
            self.lasting.append(self.lasting[-1] | self.outputs[index] & stays)
        self.needed = [helps & self.lasting[-1] & ~retained for helps in self.can_help]
        """What each operation must have that no plan makes again."""
        self.bytes_of = lru_cache(_REMEMBERED)(self._bytes_of)
        """What a set takes beside what is retained."""
        self.looks_for_a_value = 10
        """Sets that are looked at in each of two orders to know whether a value can be made beside others."""
        self.looks = 0
        """How many sets were looked at so far."""
        self.rooms = [_NEVER] * len(graph.values)
        """In how many bytes each value can be made from nothing but what cannot be made again."""
        self.known: dict[tuple[int, int], tuple[int, int]] = {}
        """For a value and others that can help: room that is too little, and room that is enough."""
        self._find_rooms()

    def _find_rooms(self) -> None:
        needed = [0] * len(self.inputs)
        lasting = self.lasting[-1]
        for index, operation in enumerate(self.graph.operations):
            least_bytes = max(
                self.bytes_of((self.inputs[index] | self.outputs[index]) & ~lasting) + self.own_bytes[index],
                max((needed[self.producer[u]] for u in operation.inputs), default=0),
            )
            for share in _MORE_ROOM if self.looks < _MANY_LOOKS else _MORE_ROOM[-1:]:
                needed[index] = int(least_bytes * (1 + share))
                room_bytes = needed[index] + self.bytes_of(lasting)
                if self.way(self.inputs[index] | lasting, lasting, lasting, room_bytes, _LOOKS_FOR_ROOM) is not None:
                    break
            else:
                continue
            for u in operation.outputs:
                if operation.recomputable:
                    self.rooms[u] = needed[index]

    def runs(self, value: int, held: int, ran: int, room_bytes: int) -> list[int] | None:
        """Return runs that recompute a value and leave all held values live; None if no way was found.

        Only the first so many operations have run. The room is for all that is there beside what is retained.
        """
        maker = self.producer[value]
        held = held & self.counts | self.lasting[ran]  # whoever reads it later has it held until then
        core = held
        for u in members(held & ~self.lasting[ran]):
            rest = (core | 1 << value) & ~(1 << u)
            if self.can_be_made(u, rest, room_bytes - self.bytes_of(rest)):
                core &= ~(1 << u)
        # At best what is held stays; or else as much as must, and the rest is made again afterwards.
        for stays in dict.fromkeys((held, core)):
            runs = _Runs(self, held, room_bytes)
            try:
                runs.bring(stays | self.inputs[maker], stays)
                runs.run(maker, stays | self.inputs[maker])
                runs.bring(held | 1 << value, stays | 1 << value)
            except _NoWay:
                continue
            return runs.order
        return None

    def way(
        self, wanted: int, held: int, stays: int, room_bytes: int, looks: int, *, deeply: bool = True
    ) -> list[tuple[int, int, int]] | None:
        """Return the runs from the held values to a set, beside those that must stay live; None if no way was found.

        Each step is the set before it, an operation that runs, and -1 if that is all, or the value that is made after
        whatever else that takes. First come sets of which the fewest bytes are missing; if that finds no way, those of
        which the latest is made earliest.
        """
        for latest_first in (False, True):
            steps = self._search(wanted, held, stays, room_bytes, looks, latest_first, deeply=deeply)
            if steps is not None:
                return steps
        return None

    def _search(
        self, wanted: int, held: int, stays: int, room_bytes: int, looks: int, latest_first: bool, *, deeply: bool
    ) -> list[tuple[int, int, int]] | None:
        queue = [((0, 0), 0, wanted)]
        came: dict[int, tuple[int, int, int]] = {}
        seen = {wanted}
        while queue and looks:
            _, _, live = heapq.heappop(queue)
            fewer = live
            while (made := self._last_made(fewer, held, room_bytes, deeply=deeply)) >= 0:
                rest = fewer & ~(1 << made)
                if rest not in came and rest != wanted:
                    came[rest] = (fewer, self.producer[made], made)
                fewer = rest
            seen.add(fewer)
            live = fewer
            if not live & ~held:
                steps = list[tuple[int, int, int]]()
                while live != wanted:
                    later, operation, made = came[live]
                    steps.append((live, operation, made))
                    live = later
                return steps
            looks -= 1
            self.looks += 1
            # In two parts: what stays is the same each time, hundreds of values in an LSTM, and is remembered.
            live_bytes = self.bytes_of(live & stays) + self.bytes_of(live & ~stays)
            for operation in {self.producer[u] for u in members(live & ~stays)}:
                if not self.graph.operations[operation].recomputable:
                    continue
                touched = self.inputs[operation] | self.outputs[operation]
                if live_bytes + self.bytes_of(touched & ~live) + self.own_bytes[operation] > room_bytes:
                    continue
                earlier = live & ~self.outputs[operation] | self.inputs[operation]
                if earlier not in seen:
                    seen.add(earlier)
                    came[earlier] = (live, operation, -1)
                    missing = earlier & ~held
                    latest = max(map(self.producer.__getitem__, members(missing)), default=-1)
                    near = self.bytes_of(missing)
                    heapq.heappush(queue, ((latest, near) if latest_first else (near, latest), len(seen), earlier))
        return None

    def _last_made(self, live: int, held: int, room_bytes: int, *, deeply: bool) -> int:
        """Return a value of a set that can be computed last, beside the rest; -1 if there is none."""
        missing = live & ~held
        free_bytes = room_bytes - self.bytes_of(live & held) - self.bytes_of(missing)
        for u in sorted(members(missing), key=self.producer.__getitem__):
            made = self.can_be_made if deeply else self.can_be_made_alone
            if made(u, live & ~(1 << u), free_bytes + self.sizes[u]):
                return u
        return -1

    def can_be_made_alone(self, value: int, held: int, room_bytes: int) -> bool:
        """Whether a value is known to be recomputable from what no plan makes again, beside others."""
        return self.rooms[value] <= room_bytes and not self.needed[self.producer[value]] & ~held

    def can_be_made(self, value: int, held: int, room_bytes: int) -> bool:
        """Whether a value is known to be recomputable from others, which stay live, in so many further bytes."""
        if self.can_be_made_alone(value, held, room_bytes):
            return True
        maker = self.producer[value]
        own_bytes = self.bytes_of((self.inputs[maker] | self.outputs[maker]) & ~held) + self.own_bytes[maker]
        if own_bytes > room_bytes or not self.graph.operations[maker].recomputable:
            return False
        helps = held & self.can_help[maker]
        if not helps:
            return False
        too_little, enough = self.known.get((value, helps), (-1, _NEVER))
        if too_little < room_bytes < enough:
            room = room_bytes + self.bytes_of(helps)
            if self.way(helps | 1 << value, helps, helps, room, self.looks_for_a_value, deeply=False) is None:
                too_little = room_bytes
            else:
                enough = room_bytes
            self.known[value, helps] = too_little, enough
        return enough <= room_bytes

    def _bytes_of(self, live: int) -> int:
        return sum(map(self.sizes.__getitem__, members(live)))


class _Runs:
    """A sequence of runs, and the values live after it."""

    def __init__(self, search: RecomputeSearch, held: int, room_bytes: int) -> None:
        self.search, self.held, self.room_bytes = search, held, room_bytes
        self.order = list[int]()
        self.latest = 0
        """Of the operations that ran, in base order."""

    def bring(self, wanted: int, stays: int) -> None:
        """Recompute a whole set beside values that must stay live; other held values stay while there is room."""
        if not wanted & ~self.held:
            return
        search = self.search
        steps = search.way(wanted, self.held, stays, self.room_bytes, _LOOKS_FOR_A_SET)
        if steps is None:
            raise _NoWay
        for live, operation, made in steps:
            if made >= 0 and not self.held >> made & 1:
                self.bring(live | search.inputs[operation], live)
                self.run(operation, live | search.inputs[operation])
            elif made < 0:
                self.run(operation, live)

    def run(self, operation: int, stays: int) -> None:
        search = self.search
        needed = stays | search.inputs[operation] | search.outputs[operation]
        free_bytes = self.room_bytes - search.own_bytes[operation] - search.bytes_of(needed)
        if free_bytes < 0 or len(self.order) >= _RUNS_AT_MOST * len(search.inputs):
            raise _NoWay
        others = [(self._next_read(u), -search.sizes[u], u) for u in members(self.held & ~needed)]
        self.held &= needed
        for _, negative, u in sorted(others):
            if -negative <= free_bytes:
                free_bytes += negative
                self.held |= 1 << u
        self.held |= search.outputs[operation]
        self.order.append(operation)
        self.latest = max(self.latest, operation)

    def _next_read(self, value: int) -> int:
        """Return the next operation of the step that reads a value."""
        readers = self.search.graph.readers[value]
        place = bisect_left(readers, self.latest)
        return readers[place] if place < len(readers) else len(self.search.inputs)


def set_of(values: Iterable[int]) -> int:
    """Return values as bits of an integer."""
    found = 0
    for u in values:
        found |= 1 << u
    return found


def members(live: int) -> Iterator[int]:
    """Return the values of a set of bits, rising."""
    while live:
        lowest = live & -live
        yield lowest.bit_length() - 1
        live ^= lowest
