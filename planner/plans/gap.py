"""Why a plan pays more than its proven bound: for which of the two time ran out, and what more of it would buy."""

from __future__ import annotations

from planner.common.limits import SolveLimits
from planner.common.units import format_percent
from planner.findings.finding import Finding
from planner.ir.problem import Problem, Solution
from planner.ir.simulator import Evaluation

GAP = "gap-to-bound"

_WORTH_SAYING = 0.005
"""From so large a gap on, as a share of the step, it is explained."""

_MOVED = 0.1
"""By so much of the gap a plan or a bound must have moved to count as moving."""


def gap_finding(problem: Problem, solution: Solution, evaluation: Evaluation, limits: SolveLimits) -> Finding | None:
    """Explain the gap between a solution, of which this is the simulation, and its bound; None if it is small."""
    step_seconds = max(problem.baseline.seconds, 1e-12)
    gap_seconds = evaluation.added_seconds - solution.lower_bound_seconds
    if gap_seconds < _WORTH_SAYING * step_seconds or solution.lower_bound_seconds <= 0:
        return None
    cause, fix = "a cheaper plan may exist", "give the solver more time (--time-limit)"
    if solution.halfway_bound_seconds is not None:
        cause, fix = _explained(solution, gap_seconds, step_seconds, limits)
    return Finding(
        rule=GAP,
        evidence=f"the plan pays {format_percent(gap_seconds / step_seconds)} of the step more than the proven lower "
        "bound",
        cause=cause,
        fix=fix,
    )


def _explained(solution: Solution, gap_seconds: float, step_seconds: float, limits: SolveLimits) -> tuple[str, str]:
    """Say which of both still moved in the second half of the time, and what twice the time would likely bring."""
    before_seconds, bound_seconds = solution.halfway_added_seconds, solution.halfway_bound_seconds
    assert bound_seconds is not None
    longer = f"--time-limit {2 * limits.time_limit_seconds:g}"
    risen_seconds = solution.lower_bound_seconds - bound_seconds
    proves = f"the bound rose by {format_percent(risen_seconds / step_seconds)}" if risen_seconds > 0 else ""
    if before_seconds is None:
        return (
            "time ran out for the plan: the first one was found in the second half of the time",
            f"{longer} would likely find a cheaper one",
        )
    fallen_seconds = before_seconds - solution.added_seconds
    if fallen_seconds >= _MOVED * gap_seconds:
        fallen = format_percent(fallen_seconds / step_seconds)
        return (
            f"time ran out for the plan: in the second half of the time it fell by {fallen} of the step"
            f"{f', and {proves}' if proves else ''}",
            f"{longer} would likely save up to another {fallen}",
        )
    if risen_seconds >= _MOVED * gap_seconds:
        return (
            f"time ran out for the bound: {proves} in the second half of the time, and the plan hardly moved",
            f"{longer} would likely prove more and save little",
        )
    return (
        "neither plan nor bound moved much in the second half of the time",
        f"{longer} would likely change little; a slightly larger budget closes the gap sooner",
    )
