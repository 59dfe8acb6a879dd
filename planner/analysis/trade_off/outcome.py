"""What one step costs at one budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.analysis.study import Study
from planner.common.options import Budget, Offload, Search
from planner.plans.plan import NoPlanFitsError, Plan
from planner.plans.smallest import smallest_budget

ENOUGH = 5e-4
"""How near to its bound a plan need come, as a share of the step: half of what the last digit in a table stands for."""

_ROW_SHARE = 0.2
"""What each size and each device may take of the time limit for the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A plan in numbers, or that there is none: its status is then ``"infeasible"``.

    In both cases the smallest budget for which a plan is known is there; ``step_seconds`` is of the planned step.
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


def for_one_row(search: Search) -> Search:
    """Return how a plan for one size or device is looked for, beside a curve that is looked for in this way."""
    return replace(search, time_limit_seconds=_ROW_SHARE * search.time_limit_seconds, enough=ENOUGH)


def ask(study: Study, budget_bytes: int, search: Search, offload: Offload) -> Outcome:
    """Plan a step for a budget, and give what comes of it in numbers; nothing is compared, as nobody would see it."""
    try:
        plan = study.planned(Budget(budget=budget_bytes), replace(search, compare=False), offload)
    except NoPlanFitsError as error:
        return Outcome(status="infeasible", minimum_feasible_peak_bytes=error.minimum_feasible_peak_bytes)
    return Outcome(
        status=plan.status,
        minimum_feasible_peak_bytes=_smallest_budget(study, plan, search, offload),
        predicted_peak_bytes=plan.peak_bytes,
        overhead=plan.overhead,
        lower_bound_overhead=plan.lower_bound_overhead,
        step_seconds=plan.step_seconds,
    )


def _smallest_budget(study: Study, plan: Plan, search: Search, offload: Offload) -> int:
    host = study.host_for(offload)
    step = study.for_host(host)
    problem = step.posed(Budget(budget=plan.budget_bytes), host)
    return smallest_budget(problem, plan.schedule_for(step.graph), search, step.static_memory)
