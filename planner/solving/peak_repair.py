"""Lower the peak by recomputing values that are live across it.

The gradient that waits while the largest operation of a layer runs can be made again after it, by a pass of its own
through much of the step. Annealing changes a few runs at a time, and does not come by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from planner.common.limits import Clock
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import Copy, lifetimes
from planner.solving.recompute_search import RecomputeSearch

_STEPS = (1e-2, 3e-3, 1e-3)
"""By so much of itself the peak is to become lower at once; the next where that did not do."""

_LEVELS = ((10, 0), (40, 0), (40, 3), (160, 3))
"""Sets that are looked at for a way to a value, and how many of those that stand in its way may go for it; the next
where that found nothing lower."""

_TRIED = 15
"""Values that wait over the highest moment, and of which it is tried to make them again, the largest first."""

_SECONDS_PER_LOOK, _SECONDS_PER_RUN = 2e-5, 3e-6
"""About what it takes to look at one set of values, and to simulate one run."""


def with_lower_peak(
    problem: Problem, schedule: Schedule, clock: Clock, least_bytes: int, is_over: Callable[[], bool] = lambda: False
) -> Schedule:
    """Return a schedule of a lower peak, down to some bytes, if one is found."""
    peak_bytes = problem.evaluate(schedule).peak_bytes
    if peak_bytes <= least_bytes or clock.left() <= 0 or is_over():
        return schedule
    repair = _PeakRepair(problem, clock, is_over)
    for level, share in product(range(len(_LEVELS)), _STEPS):
        while peak_bytes > least_bytes:
            lower = repair.lowered(schedule, max(least_bytes, peak_bytes - 1 - int(share * peak_bytes)), level)
            if lower is None:
                break
            schedule, peak_bytes = lower, problem.evaluate(lower).peak_bytes
    return schedule


class _PeakRepair:
    def __init__(self, problem: Problem, clock: Clock, is_over: Callable[[], bool]) -> None:
        self.problem, self.clock, self.is_over = problem, clock, is_over
        self.search = RecomputeSearch(problem.graph, problem.costs)
        self.beside = self.counted = 0
        self._count()

    def lowered(self, schedule: Schedule, allowed_bytes: int, level: int) -> Schedule | None:
        """Return a schedule within some bytes, by successive recomputations; None if none was found in time."""
        self.search.known.clear()
        self.search.looks_for_a_value, self.beside = _LEVELS[level]
        order = schedule.order
        excess = self._excess(order, allowed_bytes)
        while excess:
            better = self._better(order, allowed_bytes)
            if better is None or better[0] >= excess:
                return None
            excess, _, order = better
        return Schedule(order)

    def _excess(self, order: tuple[int, ...], allowed_bytes: int) -> int:
        self.clock.work(_SECONDS_PER_RUN * len(order))
        timeline = self.problem.evaluate(Schedule(order)).timeline_bytes
        return sum(there - allowed_bytes for there in timeline if there > allowed_bytes)

    def _copies(self, order: tuple[int, ...]) -> list[Copy]:
        self.clock.work(_SECONDS_PER_RUN * len(order))
        return lifetimes(self.problem.graph, Schedule(order))

    def _better(self, order: tuple[int, ...], allowed_bytes: int) -> tuple[int, int, tuple[int, ...]] | None:
        """Recompute one value that is live across the peak: the one that leaves the least above the target."""
        sizes = self.search.sizes
        highest = self.problem.evaluate(Schedule(order)).peak_position
        copies = self._copies(order)
        read = self.problem.graph.operations[order[highest]].inputs
        beside = (copy for copy in copies if copy.born < highest < copy.died and copy.value not in read)
        waiting = [copy for copy in beside if self._can_be_made(copy.value)]
        waiting.sort(key=lambda copy: (-sizes[copy.value], copy.value))
        best: tuple[int, int, tuple[int, ...]] | None = None
        for copy in waiting[:_TRIED]:
            if self.clock.left() <= 0 or self.is_over():
                return None
            for changed in self._changed(order, copies, copy.value, highest, allowed_bytes):
                found = self._excess(changed, allowed_bytes), len(changed), changed
                best = found if best is None else min(best, found)
        return best

    def _changed(
        self, order: tuple[int, ...], copies: list[Copy], value: int, after: int, allowed_bytes: int
    ) -> Iterator[tuple[int, ...]]:
        """Recompute a value before its next read; without room for that, drop and recompute another one too."""
        position = self._next_read(order, value, after)
        changed = self._with(order, copies, value, position, allowed_bytes)
        if changed is not None:
            yield changed
            return
        reads = self.problem.graph.operations[order[position]].inputs
        beside = {copy.value for copy in copies if copy.born < position < copy.died}
        beside = {u for u in beside if u != value and u not in reads and self._can_be_made(u)}
        for other in sorted(beside, key=lambda u: (-self.search.sizes[u], u))[: self.beside]:
            changed = self._with(order, copies, value, position, allowed_bytes, other)
            if changed is None:
                continue
            later = self._next_read(changed, other, position + len(changed) - len(order))
            changed = self._with(changed, self._copies(changed), other, later, allowed_bytes)
            if changed is not None:
                yield changed

    def _with(
        self, order: tuple[int, ...], copies: list[Copy], value: int, position: int, allowed_bytes: int, other: int = -1
    ) -> tuple[int, ...] | None:
        """Recompute a value at a position beside all other live values; None if no way was found."""
        held, room_bytes = 0, allowed_bytes
        for copy in copies:
            if copy.born < position <= copy.died and copy.value not in (value, other):
                if self.problem.graph.values[copy.value].retained:
                    room_bytes -= self.problem.graph.values[copy.value].size_bytes
                held |= 1 << copy.value
        runs = self.search.runs(value, held, len(set(order[:position])), room_bytes)
        self._count()
        return None if runs is None else (*order[:position], *runs, *order[position:])

    def _next_read(self, order: tuple[int, ...], value: int, after: int) -> int:
        operations = self.problem.graph.operations
        return next(at for at in range(after + 1, len(order)) if value in operations[order[at]].inputs)

    def _can_be_made(self, value: int) -> bool:
        return bool((self.search.counts & ~self.search.lasting[-1]) >> value & 1)

    def _count(self) -> None:
        self.clock.work(_SECONDS_PER_LOOK * (self.search.looks - self.counted))
        self.counted = self.search.looks
