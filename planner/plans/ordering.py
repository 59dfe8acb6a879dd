"""A budget kept in another order of the step's operations, where plans in that order cost less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.common.options import Search
from planner.errors import InfeasibleBudgetError
from planner.ir.order import renumbered, reordered
from planner.ir.problem import Problem, Solution
from planner.solvers.auto import AutoSolver
from planner.solving.orders import Order, promising_order

_TRIAL_SHARE = 0.2
"""Of the time, for each order: then the one with the cheaper plan has what is left."""

_WORTH_MOVING = 1e-3
"""By so much of the step a plan must be cheaper for operations to run in another order."""

Solve = Callable[[Problem, Search], Solution]

Outcome = Solution | InfeasibleBudgetError


def solved_in_best_order(problem: Problem, search: Search, solve: Solve) -> Solution:
    """Solve a problem in its own order, and in another one if that promises more; the schedule may be of either.

    The bound is of plans in the order of the schedule. An InfeasibleBudgetError says that no plan was found in any.
    """
    order = _other_order(problem, search)
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


def _other_order(problem: Problem, search: Search) -> Order | None:
    """Return the order that is worth a try; None where there is none, or only what was asked for may be."""
    if search.solver != AutoSolver.name or problem.baseline.peak_bytes <= problem.budget_bytes:
        return None
    return _promising(problem)


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
    return InfeasibleBudgetError(
        str(best),
        minimum_feasible_peak_bytes=best.minimum_feasible_peak_bytes,
        operation=best.operation,
        is_proven=captured.is_proven and moved.is_proven,
        lower_bound_seconds=min(captured.lower_bound_seconds, moved.lower_bound_seconds),
        lowest=lowest,
    )
