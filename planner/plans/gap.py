"""What a plan pays more than it might have to.

Why it is more than the proven bound: for which of the two time ran out, and what more of it would buy. And that a
larger budget would save much, where a plan costs more than the whole step.
"""

from __future__ import annotations

from planner.common.limits import SolveLimits
from planner.common.units import format_bytes, format_percent
from planner.findings.finding import Finding
from planner.ir.problem import Problem, Solution
from planner.ir.simulator import Evaluation

GAP = "gap-to-bound"
PRICE = "dearer-than-the-step"

_WORTH_SAYING = 0.005
"""From so large a gap on, as a share of the step, it is explained."""

_MOVED = 0.1
"""By so much of the gap a plan or a bound must have moved to count as moving."""


def price_finding(problem: Problem, evaluation: Evaluation, smallest_bytes: int | None) -> Finding | None:
    """Say that a plan, of which this is the simulation, costs more than the step without it; None if it does not.

    ``smallest_bytes`` is the smallest budget of the whole device for which a plan is known, if that was asked for.
    """
    step_seconds = max(problem.baseline.seconds, 1e-12)
    if evaluation.added_seconds <= step_seconds:
        return None
    near = ""
    if smallest_bytes is not None:
        above = (problem.budget_bytes + problem.graph.total_static_bytes) / max(smallest_bytes, 1) - 1
        near = f", with {format_percent(max(above, 0.0))} more than the smallest budget known to be feasible, "
        near += format_bytes(smallest_bytes)
    return Finding(
        rule=PRICE,
        evidence=f"the plan takes {1 + evaluation.added_seconds / step_seconds:.1f} times as long as the step without "
        f"it{near}",
        cause="so near the smallest budget a few percent of it save much time, or cost much",
        fix="raise the budget a little: 'what-if' (planner.what_if) shows what each one costs",
    )


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
