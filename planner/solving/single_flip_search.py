"""Local search for small graphs with offload: change single decisions of a plan where computing waits for transfers.

The solvers of recompute, asked as if fetching were recompute, know nothing of waiting. So a plan of theirs may hold
what is in the way of an early return, or run something again where it does not hide a transfer. Here each value is held
or let go between one operation and the next, and each rerun goes ahead of what it need not follow; what the simulator
finds cheaper is gone on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

from planner.common.limits import Clock
from planner.errors import ScheduleError
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule, recompute_lazily
from planner.ir.simulator import lifetimes
from planner.solving.offload_reduction import OffloadReduction
from planner.solving.transfer_windows import widened

Gone = frozenset[tuple[int, int]]
"""Values, each with an operation of the base order at whose begin it is let go."""

Found = tuple[tuple[float, int], Schedule]
"""What a plan adds to the step and its peak, and the plan."""


_SECONDS_PER_RUN = 2e-5
"""About what it takes to give a plan its times, for each of its runs."""


class SingleFlipSearch:
    """Neighbours of a solver's plan with the same offloaded values."""

    def __init__(self, asked: OffloadReduction, clock: Clock, is_over: Callable[[], bool]) -> None:
        self.asked, self.clock, self.is_over = asked, clock, is_over
        self.problem: Problem = asked.real
        self.graph = asked.problem.graph
        self.gaps: list[Gone] = []
        """From one use of a value to the next."""
        self.never_again: dict[int, list[int]] = {}
        for u, value in enumerate(self.graph.values):
            maker, readers = self.graph.producer[u], self.graph.readers[u]
            if value.retained or not value.size_bytes or not readers:
                continue
            for step in range(readers[-1], len(self.graph.operations)):
                self.never_again.setdefault(step, []).append(u)
            if self.graph.operations[maker].recomputable:
                uses = pairwise((maker, *readers))
                self.gaps += [frozenset((u, step) for step in range(a, b)) for a, b in uses if b > a]
        self._look = cache(self._carried_out)

    def better(self, schedule: Schedule) -> Schedule | None:
        """Improve a schedule of the reduced problem by single changes; None if none fits.

        O(operations x values) schedules for each change that helps.
        """
        now = self._gone_in(schedule)
        best = self._look(now)
        while not self.is_over():
            changed = ((gone, self._look(gone)) for gone in self._changed(now) if not self.is_over())
            fitting = [(gone, found) for gone, found in changed if found is not None]
            gone, found = min(fitting, key=lambda one: one[1][0], default=(now, None))
            if found is None or (best is not None and found[0] >= best[0]):
                break
            now, best = gone, found
        return best[1] if best is not None else None

    def _gone_in(self, schedule: Schedule) -> Gone:
        first = schedule.first_runs()
        copies: dict[int, list[tuple[int, int]]] = {}
        for copy in lifetimes(self.graph, schedule):
            copies.setdefault(copy.value, []).append((copy.born, copy.died))
        return frozenset(
            (u, step)
            for gap in self.gaps
            for u, step in gap
            if not any(born <= first[step] and died >= first[step + 1] for born, died in copies[u])
        )

    def _changed(self, gone: Gone) -> Iterator[Gone]:
        for gap in self.gaps:
            yield gone | gap
            yield gone - gap
            for one in gap:
                yield gone ^ {one}

    def _carried_out(self, gone: Gone) -> Found | None:
        dropped = {step: list(values) for step, values in self.never_again.items()}
        for u, step in gone:
            dropped.setdefault(step, []).append(u)
        try:
            order = list(recompute_lazily(self.graph, dropped).order)
        except ScheduleError:
            return None
        found = self._timed(order)
        while found is not None:
            for candidate in self._earlier(order):
                cheaper = self._timed(candidate)
                if cheaper is not None and cheaper[0] < found[0]:
                    order, found = candidate, cheaper
                    break
            else:
                break
        return found

    def _earlier(self, order: list[int]) -> Iterator[list[int]]:
        """Move each recomputation earlier, step by step."""
        first = Schedule(tuple(order)).first_runs()
        for position, index in enumerate(order):
            if first[index] == position:
                continue
            needed = [self.graph.producer[u] for u in self.graph.operations[index].inputs]
            for earlier in range(position - 1, max(first[each] for each in (index, *needed)), -1):
                yield [*order[:earlier], index, *order[earlier:position], *order[position + 1 :]]

    def _timed(self, order: list[int]) -> Found | None:
        """Widen transfer windows, and return the plan with its cost; None if it does not fit."""
        problem = self.problem
        self.clock.work(len(order) * _SECONDS_PER_RUN)
        tight = self.asked.invert(Schedule(tuple(order)))
        evaluation = problem.evaluate(tight)
        assert problem.host is not None
        if evaluation.peak_bytes > problem.budget_bytes or evaluation.host_bytes > problem.host.budget_bytes:
            return None
        wide = widened(problem, tight)
        found = problem.evaluate(wide)
        return (found.added_seconds, found.peak_bytes), wide
