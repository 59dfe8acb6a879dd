"""A lower peak by making again what waits over the highest moment: where that takes more than moves at random try.

The gradient that waits while the largest operation of a layer runs can be made again after it, by a pass of its own
through much of the step. Annealing changes a few runs at a time, and does not come by that.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.common.limits import Clock
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import Copy, lifetimes
from planner.solving.making import Making

_STEPS = (1e-2, 3e-3, 1e-3)
"""By so much of itself the peak is to become lower at once; the next where that did not do."""

_TRIED = 15
"""Values that wait over the highest moment, and of which it is tried to make them again, the largest first."""

_SECONDS_PER_LOOK, _SECONDS_PER_RUN = 2e-5, 3e-6
"""About what it takes to look at one set of values, and to simulate one run."""


def mended(
    problem: Problem, schedule: Schedule, clock: Clock, least_bytes: int, is_over: Callable[[], bool] = lambda: False
) -> Schedule:
    """Return a schedule of a lower peak, if one is found, down to some bytes."""
    peak_bytes = problem.evaluate(schedule).peak_bytes
    if peak_bytes <= least_bytes or clock.left() <= 0 or is_over():
        return schedule
    mending = _Mending(problem, clock, is_over)
    for share in _STEPS:
        while peak_bytes > least_bytes:
            allowed_bytes = max(least_bytes, peak_bytes - 1 - int(share * peak_bytes))
            lower = mending.lowered(schedule.order, allowed_bytes)
            if lower is None:
                break
            schedule = Schedule(lower)
            peak_bytes = problem.evaluate(schedule).peak_bytes
    return schedule


class _Mending:
    def __init__(self, problem: Problem, clock: Clock, is_over: Callable[[], bool]) -> None:
        self.problem, self.clock, self.is_over = problem, clock, is_over
        self.making = Making(problem.graph, problem.costs)
        self.counted = 0
        self._count()

    def lowered(self, order: tuple[int, ...], allowed_bytes: int) -> tuple[int, ...] | None:
        """Return an order within some bytes, by one change after the other; None if none was found in time."""
        self.making.known.clear()
        excess = self._excess(order, allowed_bytes)
        while excess:
            better = self._better(order, allowed_bytes)
            if better is None or better[0] >= excess:
                return None
            excess, _, order = better
        return order

    def _excess(self, order: tuple[int, ...], allowed_bytes: int) -> int:
        self.clock.work(_SECONDS_PER_RUN * len(order))
        timeline = self.problem.evaluate(Schedule(order)).timeline_bytes
        return sum(there - allowed_bytes for there in timeline if there > allowed_bytes)

    def _better(self, order: tuple[int, ...], allowed_bytes: int) -> tuple[int, int, tuple[int, ...]] | None:
        """Make one value again that waits over the highest moment; of those tried, where least is above."""
        graph = self.problem.graph
        copies = lifetimes(graph, Schedule(order))
        highest = self.problem.evaluate(Schedule(order)).peak_position
        waiting = [copy for copy in copies if copy.born < highest < copy.died and self._may_go(copy, order[highest])]
        waiting.sort(key=lambda copy: (-graph.values[copy.value].size_bytes, copy.value))
        best: tuple[int, int, tuple[int, ...]] | None = None
        for copy in waiting[:_TRIED]:
            if self.clock.left() <= 0 or self.is_over():
                return None
            position = next(
                at for at in range(highest + 1, len(order)) if copy.value in graph.operations[order[at]].inputs
            )
            held, room_bytes = 0, allowed_bytes
            for other in copies:
                if other.born < position <= other.died and other is not copy:
                    if graph.values[other.value].retained:
                        room_bytes -= graph.values[other.value].size_bytes
                    held |= 1 << other.value
            runs = self.making.runs(copy.value, held, len(set(order[:position])), room_bytes)
            self._count()
            if runs is not None:
                changed = (*order[:position], *runs, *order[position:])
                found = self._excess(changed, allowed_bytes), len(changed), changed
                best = found if best is None else min(best, found)
        return best

    def _may_go(self, copy: Copy, operation: int) -> bool:
        graph = self.problem.graph
        maker = graph.operations[graph.producer[copy.value]]
        return (
            bool(self.making.counts >> copy.value & 1)
            and maker.recomputable
            and copy.value not in graph.operations[operation].inputs
        )

    def _count(self) -> None:
        self.clock.work(_SECONDS_PER_LOOK * (self.making.looks - self.counted))
        self.counted = self.making.looks
