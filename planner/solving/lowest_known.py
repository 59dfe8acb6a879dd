"""The plan of the lowest peak found so far for a step: a budget that was once called feasible stays feasible.

A solver stops when its time is over, so one run can miss what another found. Kept beside the solutions, on disk; and
for as long as the process lives, since there may be no cache.
"""

from __future__ import annotations

from dataclasses import replace

from planner.common.limits import SolveLimits
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.solving import solution_cache

_NAME = "lowest"

_MOST_HERE = 256
_here: dict[str, Schedule] = {}
"""By the problem without its budget, what this process found; the oldest first."""


def applies_to(problem: Problem) -> bool:
    """Whether every schedule is a plan: no offload, no regions."""
    return problem.host is None and problem.regions is None and not any(o.region for o in problem.graph.operations)


def find(problem: Problem) -> Schedule | None:
    """Return the schedule of the lowest known peak, whatever the budget; None if there is none."""
    posed, key = _without_budget(problem)
    solution = solution_cache.find(posed, key)
    return solution.schedule if solution is not None else _here.get(key)


def keep(problem: Problem, schedule: Schedule) -> None:
    """Keep a schedule if its peak is lower than the lowest known."""
    posed, key = _without_budget(problem)
    solution_cache.keep(key, Solution.simulated(posed.evaluate(schedule), schedule, _NAME))
    _here.pop(key, None)
    _here[key] = schedule
    if len(_here) > _MOST_HERE:
        del _here[next(iter(_here))]


def lower(problem: Problem, schedule: Schedule) -> Schedule:
    """Return the lower of a schedule and the lowest known one, and keep it."""
    if not applies_to(problem):
        return schedule
    known = find(problem)
    if known is not None and problem.evaluate(known).peak_bytes <= problem.evaluate(schedule).peak_bytes:
        return known
    keep(problem, schedule)
    return schedule


_said: dict[str, Schedule] = {}
"""By the problem without its budget."""


def say(problem: Problem, schedule: Schedule) -> None:
    """Remember, in this process, the schedule behind a budget that an error called feasible.

    Blocks of two schedules with the same peak differ, so the next search may come back with the other.
    """
    _said[_without_budget(problem)[1]] = schedule


def said(problem: Problem) -> Schedule | None:
    """Return what :func:`say` remembers of a step."""
    return _said.get(_without_budget(problem)[1])


def _without_budget(problem: Problem) -> tuple[Problem, str]:
    """Return the problem with everything removed on which peaks do not depend, and what it is kept under."""
    # Seconds decide no peak, and are not the same where they were measured.
    costs = tuple(replace(cost, seconds=0.0) for cost in problem.costs)
    posed = replace(problem, budget_bytes=problem.baseline.peak_bytes, costs=costs)
    return posed, solution_cache.key_of(posed, _NAME, SolveLimits())
