"""Plan in another order of the operations where that is cheaper; the smallest budget for which a plan is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.common.limits import SolveLimits
from planner.common.options import Search
from planner.errors import InfeasibleBudgetError
from planner.ir.order import in_own_order, renumbered, reordered
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.ir.static_memory import StaticMemory
from planner.plans.allocator import optimizer_peak_bytes, whole_peak_bytes
from planner.plans.policy_reduction import PolicyReduction
from planner.solvers.auto import AutoSolver
from planner.solving import lowest_known
from planner.solving.modules.ilp import lowest_choice
from planner.solving.orders import Order, promising_order
from planner.solving.peak_bounds import lowest_peak, proven_lowest

_TRIAL_SHARE = 0.2
"""Of the time, for each order: then the one with the cheaper plan has what is left."""

_WORTH_MOVING = 1e-3
"""By so much of the step a plan must be cheaper for operations to run in another order."""

Solve = Callable[[Problem, Search], Solution]

Outcome = Solution | InfeasibleBudgetError


def solved_in_best_order(problem: Problem, search: Search, solve: Solve) -> Solution:
    """Solve a problem in its own order, and in a promising other one; the schedule may be of either.

    The bound is of plans in the order of the schedule. An InfeasibleBudgetError says that no plan was found in any.
    """
    is_of_use = search.solver == AutoSolver.name and problem.baseline.peak_bytes > problem.budget_bytes
    order = _promising(problem) if is_of_use else None
    if order is None:
        return solve(problem, search)
    other = reordered(problem, order)
    if other.baseline.peak_bytes <= problem.budget_bytes:
        return _as_captured(solve(other, search), order)
    trial = replace(search, time_limit_seconds=_TRIAL_SHARE * search.time_limit_seconds)
    captured = _outcome(problem, trial, solve)
    search.tell("trying another order of the operations")
    moved = _outcome(other, trial, solve)
    rest = replace(search, time_limit_seconds=(1 - 2 * _TRIAL_SHARE) * search.time_limit_seconds)
    if _is_worth_it(problem, captured, moved):
        moved = _better(moved, _outcome(other, rest, solve))
    else:
        captured = _better(captured, _outcome(problem, rest, solve))
    if isinstance(moved, Solution) and _is_worth_it(problem, captured, moved):
        return _as_captured(moved, order, captured.added_seconds if isinstance(captured, Solution) else None)
    if isinstance(captured, Solution):
        return captured
    assert isinstance(moved, InfeasibleBudgetError)
    raise _neither(captured, moved, order)


def in_orders_tried(problem: Problem) -> tuple[Problem, ...]:
    """Return a problem as it was captured and, if there is an order that ``auto`` tries beside that, in that one."""
    order = _promising(problem)
    return (problem,) if order is None else (problem, reordered(problem, order))


def proven_in_orders_tried(problem: Problem) -> int:
    """Return a lower bound on the peak of every plan that ``auto`` looks for; it may take seconds."""
    if problem.decisions.moves:
        return proven_lowest(PolicyReduction(problem).problem)
    return min(map(proven_lowest, in_orders_tried(problem)))


def _promising(problem: Problem) -> Order | None:
    return None if problem.host is not None or problem.regions is not None else promising_order(problem)


def _outcome(problem: Problem, search: Search, solve: Solve) -> Outcome:
    try:
        return solve(problem, search)
    except InfeasibleBudgetError as error:
        return error


def _rank(outcome: Outcome) -> tuple[int, float]:
    if isinstance(outcome, Solution):
        return 0, outcome.added_seconds
    return 1, outcome.minimum_feasible_peak_bytes


def _better(one: Outcome, other: Outcome) -> Outcome:
    return min(one, other, key=_rank)


def _is_worth_it(problem: Problem, captured: Outcome, moved: Outcome) -> bool:
    if isinstance(captured, Solution) and isinstance(moved, Solution):
        return moved.added_seconds < captured.added_seconds - _WORTH_MOVING * problem.baseline.seconds
    return _rank(moved) < _rank(captured)


def _as_captured(solution: Solution, order: Order, captured_seconds: float | None = None) -> Solution:
    """Return a solution of the reordered problem as one of the problem as it was captured."""
    schedule = renumbered(solution.schedule, order)
    return replace(solution, schedule=schedule, captured_seconds=captured_seconds)


def _neither(captured: InfeasibleBudgetError, moved: InfeasibleBudgetError, order: Order) -> InfeasibleBudgetError:
    """Return an error that speaks for both orders, with the lowest peak of either."""
    lowest = captured.lowest
    if (best := min(moved, captured, key=_rank)) is moved and moved.lowest is not None:
        lowest = renumbered(moved.lowest, order)
    bound_seconds = min(captured.lower_bound_seconds, moved.lower_bound_seconds)
    is_proven = captured.is_proven and moved.is_proven
    return best.but(is_proven=is_proven, lower_bound_seconds=bound_seconds, lowest=lowest)


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
    """Return the smallest known feasible budget of the whole device, and a proven lower bound on it, or 0.

    A plan's own schedule is among those that are known.
    """
    own_bytes = whole_peak_bytes(problem, schedule, static_memory)
    if problem.decisions.moves:  # a lower schedule need not follow the policy
        return own_bytes, proven_in_orders_tried(problem) + problem.graph.total_static_bytes
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
    """Return the plan of the lowest peak ever found by recompute; a deterministic search ignores earlier ones."""
    alone = replace(problem, host=None)
    return lowest_known.find(alone) if not limits.deterministic and lowest_known.applies_to(alone) else None
