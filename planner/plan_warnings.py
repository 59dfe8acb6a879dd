"""What the reader of a plan should know: where recompute cannot help, and where more search might."""

from __future__ import annotations

from collections.abc import Iterator

from planner.diagnose.rules import examine
from planner.diagnose.step_rules import BOTTLENECKS
from planner.diagnose.subject import Step, Subject
from planner.findings import Finding
from planner.problem import Problem, Solution
from planner.simulate import Evaluation
from planner.units import format_percent

_WORTH_MORE_SEARCH = 0.02


def plan_warnings(problem: Problem, evaluation: Evaluation, solution: Solution) -> tuple[Finding, ...]:
    """Look for what limits a plan.

    Parameters
    ----------
    problem : Problem
    evaluation : Evaluation
        Simulation of the solution's schedule.
    solution : Solution
    """
    if evaluation.added_seconds <= 0:
        return ()
    step = Step(problem=problem, schedule=solution.schedule, evaluation=evaluation)
    return (*examine(Subject(step=step), BOTTLENECKS), *_unproven(problem, evaluation, solution))


def _unproven(problem: Problem, evaluation: Evaluation, solution: Solution) -> Iterator[Finding]:
    gap = (evaluation.added_seconds - solution.lower_bound_seconds) / max(problem.baseline.seconds, 1e-12)
    if gap >= _WORTH_MORE_SEARCH and solution.lower_bound_seconds > 0:
        yield Finding(
            rule="gap-to-bound",
            evidence=f"the plan pays {format_percent(gap)} of the step more than the proven lower bound",
            cause="a cheaper plan may exist",
            fix="give the solver more time",
        )
