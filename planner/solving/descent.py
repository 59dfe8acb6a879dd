"""The plan of the lowest peak, whatever it costs: annealing under a budget that is lowered each time that it is kept.

Where annealing gets no lower, what waits over the highest moment is made again: see :mod:`planner.solving.mending`. It
proves nothing; :mod:`planner.solving.peak_proof` says what no plan goes below.
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

_TEMPERATURE, _WEIGHT, _PACE = 0.03, 10.0, 1e-3
"""In mean costs of an operation; what a byte over the budget costs to begin with, and how fast that price moves."""

_SLOTS = (1, SLOTS)
"""Slots of each operation: at first what runs again goes in base order, where less is to be tried."""

_LOST = 0.05
"""By so much of itself a peak may rise for want of slots: with fewer there is less to be tried."""

_LEAST_MOVES_AT_ONCE = 2_000
"""Between two looks whether patience is at its end."""

_PATIENCE_MOVES, _PATIENCE_SHARE = 150, 0.5
"""It is over after so many moves for each operation, and this share of all that were made, to no avail."""

_STARTS = 3
"""How often it begins anew, with other random moves, where the least there can be is not reached."""

_ANNEALING_SHARE = 0.5
"""Share of the time after which annealing leaves the rest to mending, once it gets no lower."""


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
    for seed in range(limits.seed, limits.seed + _STARTS):
        found = schedule
        for slots in _SLOTS:
            if problem.evaluate(found).peak_bytes > least_bytes:
                reruns = _reruns(problem, seed, found, slots)
                found = _descended(reruns, found, clock, least_bytes, is_over)
        found = mended(problem, found, clock, least_bytes, is_over)
        if problem.evaluate(found).peak_bytes < lowest_bytes:
            lowest, lowest_bytes = found, problem.evaluate(found).peak_bytes
        if lowest_bytes <= least_bytes or clock.left() <= 0 or is_over():
            break
    return lowest


def _reruns(problem: Problem, seed: int, schedule: Schedule, slots: int) -> RerunSet:
    """Lay a problem out with so many slots, or with all that a schedule needs where fewer do not come near its peak."""
    reruns = RerunSet(problem, seed, slots=slots)
    if reruns.can_be(schedule, (1 + _LOST) * problem.evaluate(schedule).peak_bytes):
        return reruns
    return RerunSet(problem, seed, slots=max(slots, slots_needed(schedule)))


def _descended(
    reruns: RerunSet, schedule: Schedule, clock: Clock, least_bytes: int, is_over: Callable[[], bool]
) -> Schedule:
    problem, state, kernels = reruns.problem, reruns.state, reruns.kernels
    reruns.reset(reruns.keys_of(schedule))
    state.real[kernels.WEIGHT] = _WEIGHT
    kernels.allow(state, max(least_bytes, problem.evaluate(schedule).peak_bytes - 1))
    moves = moves_found = 0
    patience_moves = _PATIENCE_MOVES * len(problem.graph.operations)
    moves_at_once = min(reruns.moves_at_once, max(patience_moves // 4, _LEAST_MOVES_AT_ONCE))
    while clock.left() > 0 and not is_over():
        in_time = clock.left(_ANNEALING_SHARE) > 0 or moves - moves_found < 2 * moves_at_once
        if not in_time or moves - moves_found >= patience_moves + _PATIENCE_SHARE * moves:
            break
        found = kernels.descend(reruns.tables, state, moves_at_once, _TEMPERATURE, _PACE, _STEP, least_bytes)
        clock.work(moves_at_once * reruns.move_seconds)
        moves_found = moves + found if found else moves_found
        moves += moves_at_once
        if state.real[kernels.BEST] < math.inf:  # the least there can be
            break
    return reruns.schedule(reruns.best()) if moves_found else schedule
