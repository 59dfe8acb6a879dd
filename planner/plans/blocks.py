"""The budget held against what CUDA's allocator hands out: blocks, which may be larger than what was asked for.

A solver bounds the bytes that a step asks for. A block that is not worth splitting carries up to 1 MiB more, and
which blocks those are is known only of a whole schedule. So a plan whose blocks break the budget is solved again for
less, by as much as they break it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.errors import InfeasibleBudgetError
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.ir.static_memory import StaticMemory
from planner.plans.allocator import reserved_by_cuda

ATTEMPTS = 6
"""How often a step is solved for less; most plans whose blocks break a budget need one."""


def whole_peak_bytes(problem: Problem, schedule: Schedule, static_memory: StaticMemory) -> int:
    """Return what the whole device holds at most under a schedule, as its allocator counts it."""
    static_bytes = problem.graph.static_bytes
    asked_bytes = problem.evaluate(schedule).peak_bytes + problem.graph.total_static_bytes
    reserved = reserved_by_cuda(problem, schedule, static_memory)
    if reserved is None:
        return asked_bytes
    return max(asked_bytes, reserved.allocated_bytes + static_bytes.get("reserve", 0))


def solved_in_blocks(
    problem: Problem,
    static_memory: StaticMemory,
    solve: Callable[[Problem], Solution],
    known: Callable[[], Schedule | None] = lambda: None,
) -> Solution:
    """Solve a problem so that the plan's blocks keep its budget; what was proven of it stays proven.

    ``known`` gives a schedule that is taken where none of the solver's does: blocks of two with the same peak differ.
    An InfeasibleBudgetError says that no such plan was found, with the smallest budget that the blocks of one keep.
    """
    budget_bytes = problem.budget_bytes + problem.graph.total_static_bytes
    first = solution = solve(problem)
    seen: list[tuple[int, Solution]] = []
    for attempt in range(ATTEMPTS + 1):
        needed_bytes = whole_peak_bytes(problem, solution.schedule, static_memory)
        if needed_bytes <= budget_bytes:
            return _bounded_by(first, solution)
        seen.append((needed_bytes, solution))
        tighter_bytes = solution.peak_bytes - 2**attempt * (needed_bytes - budget_bytes)
        try:
            solution = solve(replace(problem, budget_bytes=tighter_bytes))
        except InfeasibleBudgetError as error:
            if error.lowest is not None and problem.host is None and problem.regions is None:
                lowest = Solution.simulated(problem.evaluate(error.lowest), error.lowest, first.solver)
                seen.append((whole_peak_bytes(problem, lowest.schedule, static_memory), lowest))
            break
    if (schedule := known()) is not None:
        other = Solution.simulated(problem.evaluate(schedule), schedule, first.solver)
        seen.append((whole_peak_bytes(problem, schedule, static_memory), other))
    least_bytes, least = min(seen, key=lambda one: one[0])
    if least_bytes <= budget_bytes:
        return _bounded_by(first, least)
    at = problem.evaluate(least.schedule).peak_position
    raise InfeasibleBudgetError(
        "the allocator's blocks break the budget",
        minimum_feasible_peak_bytes=least_bytes,
        operation=problem.graph.operations[least.schedule.order[at]].name,
        lower_bound_seconds=first.lower_bound_seconds,
        lowest=least.schedule,
    )


def _bounded_by(first: Solution, solution: Solution) -> Solution:
    """Return a solution with what was proven of the budget itself: for less, more may be proven."""
    return replace(solution, lower_bound_seconds=min(first.lower_bound_seconds, solution.added_seconds))
