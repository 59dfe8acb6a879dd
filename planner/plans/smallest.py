"""The smallest budget for which a plan is known, and what no plan needs less than."""

from __future__ import annotations

from planner.common.limits import SolveLimits
from planner.ir.order import in_own_order
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.static_memory import StaticMemory
from planner.plans.allocator import optimizer_peak_bytes
from planner.plans.blocks import whole_peak_bytes
from planner.plans.ordering import in_orders_tried
from planner.solvers.checkpoints import lowest_choice
from planner.solving import lowest_known
from planner.solving.peak_bounds import lowest_peak


def smallest_budget(problem: Problem, schedule: Schedule, limits: SolveLimits, static_memory: StaticMemory) -> int:
    """Return the smallest budget of the whole device for which a plan is known; a plan's own schedule is one of them.

    That is what a plan says that was made with comparison.
    """
    lowest_bytes, _ = smallest_budgets(problem, *in_own_order(problem, schedule), limits, static_memory)
    return max(lowest_bytes, optimizer_peak_bytes(problem.graph, static_memory))


def smallest_budgets(
    captured: Problem, problem: Problem, schedule: Schedule, limits: SolveLimits, static_memory: StaticMemory
) -> tuple[int, int]:
    """Return what :func:`_smallest` says, of a plan in its own order and of all orders that are tried."""
    ends = [_smallest(problem, schedule, limits, static_memory)]
    for other in in_orders_tried(captured):
        if other.graph != problem.graph:
            ends.append(_smallest(other, Schedule.keep_all(other.graph), limits, static_memory))
    lowest_bytes, proven_bytes = (min(end) for end in zip(*ends, strict=True))
    return lowest_bytes, proven_bytes


def _smallest(
    problem: Problem, schedule: Schedule, limits: SolveLimits, static_memory: StaticMemory
) -> tuple[int, int]:
    """Return the smallest budget of the whole device that is known to do, and what no plan needs less than, or 0.

    A plan's own schedule is among those that are known.
    """
    own_bytes = whole_peak_bytes(problem, schedule, static_memory)
    if problem.regions is not None:
        lowest = lowest_choice(problem, limits.clock())
        return min(own_bytes, whole_peak_bytes(problem, lowest, static_memory)), 0
    floor, known = lowest_peak(problem), lowest_plan_known(problem, limits)
    static_bytes = problem.graph.total_static_bytes
    proven_bytes = floor.proven_peak_bytes + static_bytes
    if problem.host is not None:  # the floor's schedule is of another graph
        return min(own_bytes, floor.found_peak_bytes + static_bytes), proven_bytes
    others = [floor.schedule] if known is None else [floor.schedule, known]
    found_bytes = min(problem.evaluate(other).peak_bytes for other in others)
    is_lower = problem.evaluate(schedule).peak_bytes < found_bytes
    if is_lower and not limits.deterministic and lowest_known.applies_to(problem):
        lowest_known.keep(problem, schedule)
    return min(own_bytes, *(whole_peak_bytes(problem, other, static_memory) for other in others)), proven_bytes


def lowest_plan_known(problem: Problem, limits: SolveLimits) -> Schedule | None:
    """Return the lowest plan that was ever found; what is deterministic depends on nothing that was found before."""
    return lowest_known.find(problem) if not limits.deterministic and lowest_known.applies_to(problem) else None
