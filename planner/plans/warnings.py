"""What the reader of a plan should know: where recompute cannot help, and where more search might."""

from __future__ import annotations

from collections.abc import Iterator

from planner.common.units import format_bytes, format_percent
from planner.findings.finding import Finding
from planner.findings.rules import examine
from planner.findings.step_rules import BOTTLENECKS
from planner.findings.subject import Step, Subject
from planner.ir.problem import Problem, Solution
from planner.ir.simulate import Evaluation

GAP = "gap-to-bound"
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
    rounded = tuple(_rounded(problem, solution))
    if evaluation.added_seconds <= 0:
        return rounded
    step = Step(problem=problem, schedule=solution.schedule, evaluation=evaluation)
    return (*rounded, *examine(Subject(step=step), BOTTLENECKS), *_unproven(problem, evaluation, solution))


def _rounded(problem: Problem, solution: Solution) -> Iterator[Finding]:
    offloads = solution.schedule.offloads
    lossy = [offload for offload in offloads if offload.lossy]
    if lossy:
        size_bytes = sum(problem.graph.values[offload.value].size_bytes for offload in lossy)
        yield Finding(
            rule="lossy-offload",
            evidence=f"{len(lossy)} of the {len(offloads)} values that wait on the host, {format_bytes(size_bytes)}, "
            "are rounded there to bfloat16",
            cause="they come back off by up to a 256th part, and so does what is recomputed from them: gradients are "
            "not bit-equal to those of the step without recompute",
            fix="let 'verify' measure how far off they are; leave out --offload-lossy (offload_lossy) for equal bits",
        )


def _unproven(problem: Problem, evaluation: Evaluation, solution: Solution) -> Iterator[Finding]:
    gap = (evaluation.added_seconds - solution.lower_bound_seconds) / max(problem.baseline.seconds, 1e-12)
    if gap >= _WORTH_MORE_SEARCH and solution.lower_bound_seconds > 0:
        yield Finding(
            rule=GAP,
            evidence=f"the plan pays {format_percent(gap)} of the step more than the proven lower bound",
            cause="a cheaper plan may exist",
            fix="give the solver more time",
        )
