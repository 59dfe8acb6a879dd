"""What a report shows beside a plan's decisions, worked out from the solved problem."""

from __future__ import annotations

from planner.alive import RANDOM_STATE, WORKSPACE, allocations_of, tensors_at
from planner.anatomy import placement
from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.layers import Layers
from planner.plan_details import MoreMemory, StepDetails
from planner.problem import Problem
from planner.schedule import Schedule
from planner.simulate import Evaluation
from planner.solvers import solve
from planner.timeline import timeline_of

_GIB = 2**30

_SECONDS_FOR_MORE = 0.5
"""For the plan of a larger budget; counted as work, so that the same report comes out every time."""


def step_details(
    problem: Problem, schedule: Schedule, evaluation: Evaluation, more: MoreMemory | None = None
) -> StepDetails:
    """Give the step over time and what fills its peak.

    Parameters
    ----------
    problem : Problem
    schedule : Schedule
    evaluation : Evaluation
        Its simulation.
    more : MoreMemory, optional
        What a larger budget would buy.
    """
    graph, costs = problem.graph, problem.costs
    allocations = tuple(allocations_of(graph, costs, schedule))
    tensors = [made for made in allocations if made.kind not in (WORKSPACE, RANDOM_STATE)]
    of_modules = Layers(of=tuple(operation.module for operation in graph.operations), blocks=())
    return StepDetails(
        before=timeline_of(graph, costs, Schedule.keep_all(graph), problem.baseline),
        after=timeline_of(graph, costs, schedule, evaluation),
        alive=tensors_at(tensors, evaluation.peak_position),
        one_more_gib=more,
        modules=placement(graph, costs, schedule, of_modules),
        allocations=allocations,
    )


def one_more_gib(problem: Problem, overhead_seconds: float) -> MoreMemory | None:
    """Say what a budget larger by a GiB would buy; nothing where nothing is recomputed now.

    Parameters
    ----------
    problem : Problem
    overhead_seconds : float
        What the plan pays for recompute now, which no larger budget can make more.
    """
    if overhead_seconds <= 0 or problem.baseline.seconds <= 0:
        return None
    larger = Problem(graph=problem.graph, costs=problem.costs, budget_bytes=problem.budget_bytes + _GIB)
    seconds = 0.0
    if problem.baseline.peak_bytes > larger.budget_bytes:
        try:
            found = solve(larger, "ilp", time_limit_seconds=_SECONDS_FOR_MORE, deterministic=True)
            seconds = min(overhead_seconds, found.recompute_seconds)
        except (InfeasibleBudgetError, SolverUnavailableError):
            return None
    return MoreMemory(
        budget_bytes=larger.budget_bytes + problem.graph.total_static_bytes,
        overhead=seconds / problem.baseline.seconds,
    )
