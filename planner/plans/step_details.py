"""Details of a plan: memory over time, tensors alive at the peak, and what 1 GiB more would buy."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from planner.common.limits import SolveLimits
from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.ir.graph import Phase
from planner.ir.layers import Layers
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation, seconds_of_runs
from planner.plans.liveness import RANDOM_STATE, WORKSPACE, alive_at, joined, placement
from planner.plans.plan import MoreMemory, StepDetails, Timeline, TimelinePoint
from planner.solvers import solve
from planner.solvers.auto import AutoSolver
from planner.solving.incumbent import Incumbent
from planner.solving.transfer_windows import widened

MOST_POINTS = 240
"""Of a timeline; in longer steps neighbouring runs share a point, which is as high as the highest of them."""

_GIB = 2**30

_SECONDS_FOR_MORE, _SECONDS_FOR_MORE_WITH_OFFLOAD = 0.5, 2.0
"""For the plan of a larger budget; counted as work, so that the same report comes out every time."""


def step_details(captured: Problem, problem: Problem, schedule: Schedule, evaluation: Evaluation) -> StepDetails:
    """Return the step over time, what fills its peak, and what a larger budget would buy.

    The schedule is of the problem, whose operations may be in another order than as they were captured.
    """
    graph, costs = problem.graph, problem.costs
    alive = alive_at(graph, costs, schedule, evaluation.peak_position)
    of_modules = Layers(of=tuple(operation.module for operation in graph.operations), blocks=())
    return StepDetails(
        before=_timeline(captured, Schedule.keep_all(captured.graph), captured.baseline),
        after=_timeline(problem, schedule, evaluation),
        alive=joined(one for one in alive if one.kind not in (WORKSPACE, RANDOM_STATE)),
        one_more_gib=_one_more_gib(problem, schedule, evaluation.added_seconds),
        modules=placement(graph, costs, schedule, of_modules),
    )


def over_time(problem: Problem, schedule: Schedule) -> StepDetails:
    """Return the step over time alone, without recompute and with a schedule."""
    return StepDetails(
        before=_timeline(problem, Schedule.keep_all(problem.graph), problem.baseline),
        after=_timeline(problem, schedule, problem.evaluate(schedule)),
        alive=(),
    )


def _one_more_gib(problem: Problem, schedule: Schedule, overhead_seconds: float) -> MoreMemory | None:
    """Estimate the overhead with 1 GiB more, if there is any now: at most that of this schedule."""
    if problem.regions is not None or overhead_seconds <= 0 or problem.baseline.seconds <= 0:
        return None
    larger = replace(problem, budget_bytes=problem.budget_bytes + _GIB)
    seconds = 0.0
    if problem.baseline.peak_bytes > larger.budget_bytes:
        try:
            seconds = min(overhead_seconds, _found_seconds(larger, schedule))
        except (InfeasibleBudgetError, SolverUnavailableError):
            return None
    return MoreMemory(
        budget_bytes=larger.budget_bytes + problem.graph.total_static_bytes, overhead=seconds / problem.baseline.seconds
    )


def _timeline(problem: Problem, schedule: Schedule, evaluation: Evaluation) -> Timeline:
    """Return what the whole device holds over the step, in O(runs)."""
    graph, order, sizes = problem.graph, schedule.order, evaluation.timeline_bytes
    begins = [0.0, *accumulate(seconds_of_runs(problem.costs, order))]
    first_runs = schedule.first_runs()
    together = max(1, -(-len(order) // MOST_POINTS))
    points = []
    for first in range(0, len(order), together):
        highest = max(range(first, min(first + together, len(order))), key=sizes.__getitem__)
        operation = graph.operations[order[highest]]
        points.append(
            TimelinePoint(
                seconds=begins[first],
                size_bytes=sizes[highest] + graph.total_static_bytes,
                operation=operation.target,
                module=operation.module,
                phase="recompute" if highest > first_runs[order[highest]] else operation.phase.value,
            )
        )
    turn = (at for at, index in enumerate(order) if graph.operations[index].phase is not Phase.FORWARD)
    backward_seconds = begins[next(turn, len(order))]
    return Timeline(step_seconds=begins[-1], backward_seconds=backward_seconds, points=tuple(points))


def _found_seconds(problem: Problem, schedule: Schedule) -> float:
    if problem.host is None:
        return solve(problem, "ilp", time_limit_seconds=_SECONDS_FOR_MORE, deterministic=True).added_seconds
    incumbent = Incumbent(problem)
    incumbent.update(widened(problem, schedule), "")
    effort = SolveLimits(time_limit_seconds=_SECONDS_FOR_MORE_WITH_OFFLOAD, deterministic=True)
    AutoSolver().improve(incumbent, effort=effort)
    return incumbent.added_seconds
