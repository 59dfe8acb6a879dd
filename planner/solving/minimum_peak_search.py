"""Search for the plan of the lowest peak: annealing under a budget that is lowered each time that it is kept.

Some come down at once, others are stuck on the way: so several begin, and one goes on from the best. Then what waits
over the highest moment is made again: see :mod:`planner.solving.peak_repair`. It proves nothing;
:mod:`planner.solving.peak_proof` says what no plan goes below.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.common.limits import Clock, SolveLimits
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.solving.peak_repair import with_lower_peak
from planner.solving.rerun_set import SLOTS, RerunSet

_STEP = 2e-3
"""By so much of itself a budget that was kept is lowered."""

_KINDS = ((1, 0.03), (SLOTS, 0.3))
"""Slots of each operation, and temperature in mean costs of one, of those that begin side by side. With one slot what
runs again goes in base order, and less is to be tried; where it is hotter, fewer are stuck, but more runs again for
nothing, and mending finds less."""

_LAST = (SLOTS, 0.03)
"""The same, of one that goes on where the best of those ended: the first of those that are alike."""

_LAST_SHARE = 0.7
"""Share of what is left of the time that it has: where those do not end alike, more may help than mending."""

_WEIGHT, _PACE = 10.0, 1e-3
"""What a byte over the budget costs to begin with, in mean costs of an operation, and how fast that price moves."""

_TIMES, _ALIKE = 2, 2e-3
"""How often some begin side by side at most; where they end so near each other, others would end there, too."""

_LOST = 0.05
"""By so much of itself a peak may rise for want of slots."""

_LEAST_MOVES_AT_ONCE = 2_000
"""Between two looks whether patience is at its end."""

_PATIENCE_MOVES, _PATIENCE_SHARE = 150, 0.5
"""It is over after so many moves for each operation, and this share of all that were made, to no avail."""

_STILL = 0.25
"""Where something lower was found within this share of all moves, it goes on beyond its time."""

_STARTS = 3
"""How often all begins anew, with other random moves, where the least there can be is not reached."""

_ANNEALING_SHARE = 0.5
"""Share of what is left of the time that annealing has before mending, where all end alike."""


def lowest_plan(
    problem: Problem, schedule: Schedule, limits: SolveLimits, is_over: Callable[[], bool] = lambda: False
) -> Schedule:
    """Return the schedule of the lowest peak found from a given one, down to the problem's budget.

    It needs numba, and ends where the budget is kept, time is up, or nothing lower was found for long. Whoever asks for
    the lowest peak there is gives the proven one for a budget.
    """
    clock = limits.clock()
    least_bytes = problem.budget_bytes
    lowest, lowest_bytes = schedule, problem.evaluate(schedule).peak_bytes
    for start in range(limits.seed, limits.seed + _STARTS):
        if lowest_bytes <= least_bytes or clock.left() <= 0 or is_over():
            break
        for found in _raced(problem, schedule, start, clock, is_over):
            found = with_lower_peak(problem, found, clock, least_bytes, is_over)
            if problem.evaluate(found).peak_bytes < lowest_bytes:
                lowest, lowest_bytes = found, problem.evaluate(found).peak_bytes
            if lowest_bytes <= least_bytes:
                break
    return lowest


def _raced(
    problem: Problem, schedule: Schedule, start: int, clock: Clock, is_over: Callable[[], bool]
) -> list[Schedule]:
    """Start several searches, continue from the best, and return where it ends and whether all ended alike."""
    seconds = _ANNEALING_SHARE * max(clock.left(), 0.0) / (_TIMES + 1)
    ended: list[tuple[int, Schedule]] = []
    alike: list[Schedule] = []
    for times in range(start * _TIMES, (start + 1) * _TIMES):
        for seed, kind in enumerate(_KINDS, times * len(_KINDS)):
            found = _annealed(problem, schedule, seed, kind, clock, seconds / len(_KINDS), is_over)
            ended.append((problem.evaluate(found).peak_bytes, found))
            if ended[-1][0] <= problem.budget_bytes:
                return [found]
        last = ended[-len(_KINDS) :]
        peaks = [peak_bytes for peak_bytes, _ in last]
        if max(peaks) <= (1 + _ALIKE) * min(peaks):
            alike = [found for _, found in last]
            break
    least_bytes = min(peak_bytes for peak_bytes, _ in ended)
    best = next(found for peak_bytes, found in ended if peak_bytes <= (1 + _ALIKE) * least_bytes)
    seconds = seconds if alike else _LAST_SHARE * clock.left()
    return [_annealed(problem, best, start, _LAST, clock, seconds, is_over), *alike]


def _annealed(
    problem: Problem,
    schedule: Schedule,
    seed: int,
    kind: tuple[int, float],
    clock: Clock,
    seconds: float,
    is_over: Callable[[], bool],
) -> Schedule:
    """Lower the peak from a schedule until nothing lower was found for a while."""
    until = clock.left() - seconds
    least_bytes, from_bytes = problem.budget_bytes, problem.evaluate(schedule).peak_bytes
    slots, temperature = kind
    reruns = RerunSet(problem, seed, slots=slots)
    if not reruns.can_be(schedule, (1 + _LOST) * from_bytes):
        reruns = RerunSet(problem, seed, slots=slots, room_for=schedule)
    state, kernels = reruns.state, reruns.kernels
    reruns.reset(reruns.keys_of(schedule))
    state.real[kernels.WEIGHT] = _WEIGHT
    kernels.allow(state, max(least_bytes, from_bytes - 1))
    moves = moves_found = 0
    patience_moves = _PATIENCE_MOVES * len(problem.graph.operations)
    moves_at_once = min(reruns.moves_at_once, max(patience_moves // 4, _LEAST_MOVES_AT_ONCE))
    while clock.left() > 0 and not is_over():
        in_time = clock.left() > until or moves - moves_found < max(2 * moves_at_once, _STILL * moves)
        if not in_time or moves - moves_found >= patience_moves + _PATIENCE_SHARE * moves:
            break
        found = kernels.descend(reruns.tables, state, moves_at_once, temperature, _PACE, _STEP, least_bytes)
        clock.work(moves_at_once * reruns.move_seconds)
        moves_found = moves + found if found else moves_found
        moves += moves_at_once
        if state.real[kernels.BEST] < math.inf:  # the least there can be
            break
    return reruns.schedule(reruns.best()) if moves_found else schedule
