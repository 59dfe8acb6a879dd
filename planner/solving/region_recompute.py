"""Recompute inside regions: what is compiled with a block runs again only while that block runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.errors import InfeasibleBudgetError
from planner.ir.graph import TrainingGraph
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate

_ATTEMPTS = 6


def confine(graph: TrainingGraph, schedule: Schedule) -> Schedule:
    """Put every recomputation that stands outside its region off until the region runs next.

    What would come after its region's last operation is of no use there, and is left out. Operations
    without a region stay where they are. O(operations + runs).
    """
    before: dict[int, list[int]] = {}
    waiting: dict[str, list[int]] = {}
    recomputations = schedule.recomputations()
    for index, operation in enumerate(graph.operations):
        due = waiting.pop(operation.region, []) if operation.region else []
        for again in recomputations.get(index, ()):
            region = graph.operations[again].region
            place = due if region in ("", operation.region) else waiting.setdefault(region, [])
            if again not in place:
                place.append(again)
        if due:
            before[index] = due
    return Schedule.with_recomputations(graph, before)


def confined(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
    """Solve a problem so that recomputations stay in their regions.

    Solvers know no regions, and seldom need to: a value is made again right before it is read, by an
    operation of the same region. Where that is not so, putting recomputations off can raise the peak;
    then less is asked for. The lower bound is that of the problem as it was first posed.
    """
    solution = solve(problem)
    if not any(operation.region for operation in problem.graph.operations):
        return solution
    bound_seconds, asked = solution.lower_bound_seconds, problem
    for _ in range(_ATTEMPTS):
        schedule = confine(problem.graph, solution.schedule)
        evaluation = simulate(problem.graph, problem.costs, schedule)
        excess_bytes = evaluation.peak_bytes - problem.budget_bytes
        if excess_bytes <= 0:
            return Solution.simulated(evaluation, schedule, solution.solver, lower_bound_seconds=bound_seconds)
        asked = replace(asked, budget_bytes=asked.budget_bytes - excess_bytes)
        solution = solve(asked)
    raise InfeasibleBudgetError(
        "no plan was found whose recomputations stay inside their blocks",
        minimum_feasible_peak_bytes=evaluation.peak_bytes + problem.graph.total_static_bytes,
        operation=problem.graph.operations[schedule.order[evaluation.peak_position]].name,
    )
