"""What one step costs at one budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.analysis.study import Study
from planner.common.limits import SolveLimits
from planner.ir.problem import Progress
from planner.plans.plan import NoPlanFitsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A plan in numbers, or that there is none.

    Parameters
    ----------
    status : str
        ``"optimal"``, ``"feasible"`` or ``"infeasible"``.
    minimum_feasible_peak_bytes : int
        Smallest budget for which a plan is known.
    predicted_peak_bytes, overhead, lower_bound_overhead : optional
        Of the plan.
    step_seconds : float or None
        Predicted time of the planned step.
    """

    status: str
    minimum_feasible_peak_bytes: int
    predicted_peak_bytes: int | None = None
    overhead: float | None = None
    lower_bound_overhead: float | None = None
    step_seconds: float | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.predicted_peak_bytes is not None


def ask(
    study: Study,
    budget_bytes: int,
    *,
    solver: str,
    effort: SolveLimits,
    progress: Progress | None = None,
    **offload: Any,
) -> Outcome:
    """Plan a step for a budget, with :meth:`Study.plan`'s options on offload; give what comes of it in numbers."""
    try:
        plan = study.plan(
            budget=budget_bytes,
            solver=solver,
            time_limit_seconds=effort.time_limit_seconds,
            deterministic=effort.deterministic,
            seed=effort.seed,
            progress=progress,
            **offload,
        )
    except NoPlanFitsError as error:
        return Outcome(status="infeasible", minimum_feasible_peak_bytes=error.minimum_feasible_peak_bytes)
    return Outcome(
        status=plan.status,
        minimum_feasible_peak_bytes=plan.minimum_feasible_peak_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        overhead=plan.overhead,
        lower_bound_overhead=plan.lower_bound_overhead,
        step_seconds=plan.baseline_step_seconds + plan.added_seconds,
    )
