"""A captured step held against the model's own: where it is slower or larger without recompute, and by which operators.

Whatever capture adds is paid by every plan, so it is said and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from planner.analysis.study import Study
from planner.common.units import format_bytes, format_seconds
from planner.errors import CaptureError
from planner.findings.finding import Finding, Severity
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.plans.liveness import alive_at
from planner.plans.plan import EagerStep

SLOWER, LARGER = "slower-than-eager", "larger-than-eager"
"""Rules of findings."""

WORTH_SAYING = 1.02
"""Of eager's time or peak; less is within what costs are known to."""

_MOST_NAMED = 3


def _seconds_by_operator(step: Problem) -> Counter[str]:
    """Return how long the operators of each name take together."""
    found: Counter[str] = Counter()
    for operation, cost in zip(step.graph.operations, step.costs, strict=True):
        found[_plain(operation.target)] += cost.first_seconds  # type: ignore[assignment]
    return found


def _bytes_at_peak_by_operator(step: Problem) -> Counter[str]:
    """Return the bytes live at the peak without recompute, by the operators that made them."""
    found: Counter[str] = Counter()
    for made in alive_at(step.graph, step.costs, Schedule.keep_all(step.graph), step.baseline.peak_position):
        found[_plain(made.operation)] += made.size_bytes
    return found


def eager_step(eager: Study | CaptureError | None) -> EagerStep | None:
    """Return what a recorded step needs, if it could be recorded."""
    if not isinstance(eager, Study):
        return None
    return EagerStep(peak_bytes=eager.whole_bytes, step_seconds=eager.problem().baseline.seconds)


def findings(single: Problem, planned: Problem, eager: Study | CaptureError | None) -> Iterator[Finding]:
    """Report where a captured step, whatever its budget, is slower or larger than eager's, or that eager's is unknown.

    Times are those of ``single`` operations. Memory is that of the step as it is ``planned``, which may have joined
    operations that write over an input.
    """
    if isinstance(eager, CaptureError):
        yield Finding(
            rule="eager-unknown",
            severity=Severity.NOTE,
            evidence=str(eager),
            cause="percentages are of the captured step's peak, not of eager's",
            fix="give the budget in bytes, or measure a step of your own",
        )
    step = eager_step(eager)
    if step is None or not isinstance(eager, Study):
        return
    own = eager.problem()
    seconds = sum(cost.first_seconds for cost in single.costs)
    if seconds > WORTH_SAYING * step.step_seconds > 0:
        yield _finding(
            SLOWER,
            f"{seconds / step.step_seconds:.3f} of eager's {format_seconds(step.step_seconds)}",
            _seconds_by_operator(single) - _seconds_by_operator(own),
            format_seconds,
        )
    peak_bytes = planned.baseline.peak_bytes + planned.graph.total_static_bytes
    if peak_bytes > WORTH_SAYING * step.peak_bytes:
        yield _finding(
            LARGER,
            f"{peak_bytes / step.peak_bytes:.3f} of eager's {format_bytes(step.peak_bytes)}",
            _bytes_at_peak_by_operator(planned) - _bytes_at_peak_by_operator(own),
            format_bytes,
        )


def _finding(rule: str, evidence: str, more: Counter[str], write: Callable[[float], str]) -> Finding:
    named = ", ".join(f"{name} +{write(extra)}" for name, extra in more.most_common(_MOST_NAMED))
    return Finding(
        rule=rule,
        severity=Severity.NOTE,
        evidence=f"without recompute the captured step needs {evidence}: {named}",
        cause="capture runs these operations differently than eager, or more of them; every plan pays for that",
        fix="compare with runtime='modules', which runs the eager step",
    )


def _plain(target: str) -> str:
    """Return an operator's name without what says that it writes in place, or how it is called.

    >>> _plain("aten.relu_.default"), _plain("aten.add.Tensor")
    ('relu', 'add')
    """
    name = target.split(".")[1] if target.count(".") > 1 else target
    return name.rstrip("_") or name
