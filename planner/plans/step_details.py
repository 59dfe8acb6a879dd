"""What a report shows beside a plan's decisions, worked out from the solved problem."""

from __future__ import annotations

from dataclasses import replace

from planner.common.limits import SolveLimits
from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.ir.layers import Layers
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation
from planner.plans.liveness import RANDOM_STATE, WORKSPACE, allocations_of, placement, tensors_at
from planner.plans.plan import MoreMemory, StepDetails
from planner.plans.timeline import timeline_of
from planner.solvers import solve
from planner.solvers.auto import AutoSolver
from planner.solving.incumbent import Incumbent
from planner.solving.transfer_windows import widened, without_unneeded

_GIB = 2**30

_SECONDS_FOR_MORE, _SECONDS_FOR_MORE_WITH_OFFLOAD = 0.5, 2.0
"""For the plan of a larger budget; counted as work, so that the same report comes out every time."""


def step_details(
    problem: Problem, schedule: Schedule, evaluation: Evaluation, more: MoreMemory | None = None
) -> StepDetails:
    """Return the step over time and what fills its peak.

    Parameters
    ----------
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


def one_more_gib(problem: Problem, schedule: Schedule, overhead_seconds: float) -> MoreMemory | None:
    """Say what a budget larger by a GiB would buy; nothing where nothing is added to the step now.

    Parameters
    ----------
    schedule : Schedule
        The plan, which keeps the larger budget too.
    overhead_seconds : float
        What it pays for recompute and for waiting, which no larger budget can make more.
    """
    if overhead_seconds <= 0 or problem.baseline.seconds <= 0:
        return None
    larger = replace(problem, budget_bytes=problem.budget_bytes + _GIB)
    seconds = 0.0
    if problem.baseline.peak_bytes > larger.budget_bytes:
        try:
            seconds = min(overhead_seconds, _found_seconds(larger, schedule))
        except (InfeasibleBudgetError, SolverUnavailableError):
            return None
    return MoreMemory(
        budget_bytes=larger.budget_bytes + problem.graph.total_static_bytes,
        overhead=seconds / problem.baseline.seconds,
    )


def _found_seconds(problem: Problem, schedule: Schedule) -> float:
    if problem.host is None:
        return solve(problem, "ilp", time_limit_seconds=_SECONDS_FOR_MORE, deterministic=True).added_seconds
    incumbent = Incumbent(problem)
    incumbent.update(without_unneeded(problem, widened(problem, schedule)), "")
    effort = SolveLimits(time_limit_seconds=_SECONDS_FOR_MORE_WITH_OFFLOAD, deterministic=True)
    AutoSolver().improve(incumbent, effort=effort)
    return incumbent.added_seconds
