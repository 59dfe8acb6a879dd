"""What the reader of a plan should know: where recompute cannot help, and where more search might."""

from __future__ import annotations

from collections.abc import Iterator

from planner.plan_parts import PlanWarning
from planner.problem import Problem, Solution
from planner.simulate import Evaluation, lifetimes
from planner.units import format_bytes, format_percent

_DOMINATING_STATIC = 0.8
_DOMINATING_VALUE = 0.4
_WORTH_MORE_SEARCH = 0.02


def plan_warnings(problem: Problem, evaluation: Evaluation, solution: Solution) -> tuple[PlanWarning, ...]:
    """Look for what limits a plan.

    Parameters
    ----------
    problem : Problem
    evaluation : Evaluation
        Simulation of the solution's schedule.
    solution : Solution
    """
    if evaluation.recompute_seconds <= 0:
        return ()
    return (
        *_static(problem),
        *_one_value(problem, evaluation, solution),
        *_unproven(problem, evaluation, solution),
    )


def _static(problem: Problem) -> Iterator[PlanWarning]:
    static_bytes = problem.graph.total_static_bytes
    share = static_bytes / (static_bytes + problem.budget_bytes)
    if share >= _DOMINATING_STATIC:
        yield PlanWarning(
            rule="static-dominates",
            cause=f"{format_percent(share)} of the budget ({format_bytes(static_bytes)}) is resident before the step, "
            "and recompute cannot make that smaller",
            fix="hold parameters and optimizer state in a smaller dtype, or shard them",
        )


def _one_value(problem: Problem, evaluation: Evaluation, solution: Solution) -> Iterator[PlanWarning]:
    graph, peak = problem.graph, evaluation.peak_position
    alive = [copy.value for copy in lifetimes(graph, solution.schedule) if copy.born <= peak <= copy.died]
    if not alive:
        return
    largest = max(alive, key=lambda value: graph.values[value].size_bytes)
    share = graph.values[largest].size_bytes / max(evaluation.peak_bytes, 1)
    if share >= _DOMINATING_VALUE:
        producer = graph.operations[graph.producer[largest]]
        yield PlanWarning(
            rule="one-value-dominates",
            cause=f"one value of {format_bytes(graph.values[largest].size_bytes)}, made by {producer.target} in "
            f"{producer.module or 'the model'}, is {format_percent(share)} of what the step holds at its peak",
            fix="compute it in chunks, as a loss over slices of the sequence does for logits",
        )


def _unproven(problem: Problem, evaluation: Evaluation, solution: Solution) -> Iterator[PlanWarning]:
    gap = (evaluation.recompute_seconds - solution.lower_bound_seconds) / max(problem.baseline.seconds, 1e-12)
    if gap >= _WORTH_MORE_SEARCH and solution.lower_bound_seconds > 0:
        yield PlanWarning(
            rule="gap-to-bound",
            cause=f"the plan pays {format_percent(gap)} of the step more than the proven lower bound",
            fix="give the solver more time; a cheaper plan may exist",
        )
