"""The plan of the lowest peak, whatever it costs: annealing under a budget that is lowered each time that it is kept.

Some come down at once, others are long stuck: so several begin side by side, and the better half goes on for twice as
long, until one is left. Where that gets no lower, what waits over the highest moment is made again: see
:mod:`planner.solving.mending`. It proves nothing; :mod:`planner.solving.peak_proof` says what no plan goes below.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.common.limits import Clock, SolveLimits
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.solving.mending import mended
from planner.solving.rerun_set import SLOTS, RerunSet, slots_needed

_STEP = 2e-3
"""By so much of itself a budget that was kept is lowered."""

_SLOTS, _LAST_SLOTS = (1, SLOTS), SLOTS
"""Slots of each operation, of those that begin side by side, and of one that goes on where the best of them ended. With
one slot what runs again goes in base order, and less is to be tried."""

_TEMPERATURE, _WEIGHT, _PACE = 0.03, 10.0, 1e-3
"""In mean costs of an operation; what a byte over the budget costs to begin with, and how fast that price moves. Where
it is hotter, more runs again for nothing, and mending finds less."""

_LOST = 0.05
"""By so much of itself a peak may rise for want of slots."""

_LEAST_MOVES_AT_ONCE = 2_000
"""Between two looks whether patience is at its end."""

_PATIENCE_MOVES, _PATIENCE_SHARE = 150, 0.5
"""It is over after so many moves for each operation, and this share of all that were made, to no avail."""

_STARTS = 3
"""How often all begins anew, with other random moves, where the least there can be is not reached."""

_ANNEALING_SHARE = 0.5
"""Share of what is left of the time that annealing takes at most before mending, if it gets no lower."""


def descended(
    problem: Problem, schedule: Schedule, limits: SolveLimits, is_over: Callable[[], bool] = lambda: False
) -> Schedule:
    """Return the schedule of the lowest peak that is found from a given one, down to the budget of the problem.

    It needs numba, and ends where the budget is kept, time is up, or nothing lower was found for long. Whoever asks for
    the lowest peak there is gives the proven one for a budget.
    """
    clock = limits.clock()
    least_bytes = problem.budget_bytes
    lowest, lowest_bytes = schedule, problem.evaluate(schedule).peak_bytes
    for start in range(limits.seed, limits.seed + _STARTS):
        if lowest_bytes <= least_bytes or clock.left() <= 0 or is_over():
            break
        found = _raced(problem, schedule, start, clock, is_over)
        found = mended(problem, found, clock, least_bytes, is_over)
        if problem.evaluate(found).peak_bytes < lowest_bytes:
            lowest, lowest_bytes = found, problem.evaluate(found).peak_bytes
    return lowest


def _raced(problem: Problem, schedule: Schedule, start: int, clock: Clock, is_over: Callable[[], bool]) -> Schedule:
    """Begin several descents, and go on with the better half of them until one is left, and from there on anew."""
    seeds = enumerate(_SLOTS, start * len(_SLOTS))
    going = [_Descent(problem, schedule, seed, slots) for seed, slots in seeds]
    seconds = _ANNEALING_SHARE * max(clock.left(), 0.0) / (2 + math.log2(len(going)))
    while going:
        for each in going:
            each.go_on(clock, seconds / len(going), is_over)
            if each.is_at_least:
                return each.found
        going.sort(key=lambda each: each.lowest_bytes)
        best, going = going[0], going[: len(going) // 2]
    last = _Descent(problem, best.found, start, _LAST_SLOTS)
    last.go_on(clock, seconds, is_over)
    return last.found


class _Descent:
    """Annealing from a schedule downwards, which can go on where it stopped."""

    def __init__(self, problem: Problem, schedule: Schedule, seed: int, slots: int) -> None:
        self.problem = problem
        self.found, self.lowest_bytes = schedule, problem.evaluate(schedule).peak_bytes
        """The lowest so far."""
        self.moves = self.moves_found = 0
        """All, and when the lowest was found."""
        self.reruns = reruns = RerunSet(problem, seed, slots=slots)
        if not reruns.can_be(schedule, (1 + _LOST) * self.lowest_bytes):
            self.reruns = reruns = RerunSet(problem, seed, slots=max(slots, slots_needed(schedule)))
        reruns.reset(reruns.keys_of(schedule))
        reruns.state.real[reruns.kernels.WEIGHT] = _WEIGHT
        reruns.kernels.allow(reruns.state, max(problem.budget_bytes, self.lowest_bytes - 1))

    @property
    def is_at_least(self) -> bool:
        """Whether it is down at the budget of the problem."""
        return self.lowest_bytes <= self.problem.budget_bytes

    def go_on(self, clock: Clock, seconds: float, is_over: Callable[[], bool]) -> None:
        """Anneal for so long, or longer where it gets lower; until nothing lower was found for long, or time is up."""
        until = clock.left() - seconds
        reruns, least_bytes = self.reruns, self.problem.budget_bytes
        patience_moves = _PATIENCE_MOVES * len(self.problem.graph.operations)
        at_once = min(reruns.moves_at_once, max(patience_moves // 4, _LEAST_MOVES_AT_ONCE))
        moves_before = self.moves_found
        while clock.left() > 0 and not is_over() and not self.is_at_least:
            in_time = clock.left() > until or self.moves - self.moves_found < 2 * at_once
            if not in_time or self.moves - self.moves_found >= patience_moves + _PATIENCE_SHARE * self.moves:
                break
            found = reruns.kernels.descend(
                reruns.tables, reruns.state, at_once, _TEMPERATURE, _PACE, _STEP, least_bytes
            )
            clock.work(at_once * reruns.move_seconds)
            self.moves_found = self.moves + found if found else self.moves_found
            self.moves += at_once
            if reruns.state.real[reruns.kernels.BEST] < math.inf:  # the least there can be
                break
        if self.moves_found > moves_before:
            self.found = reruns.schedule(reruns.best())
            self.lowest_bytes = self.problem.evaluate(self.found).peak_bytes
