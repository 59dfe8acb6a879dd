"""Compare a present checkpointing set-up with the best plans at its own peak and within a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from planner import strategies
from planner.analysis.study import Study
from planner.common.json_reader import attributes
from planner.common.options import Offload, Search
from planner.common.registry import did_you_mean
from planner.common.units import Size
from planner.errors import UsageError
from planner.ir.schedule import Schedule
from planner.plans.allocator import optimizer_peak_bytes
from planner.plans.comparison import Evaluated, evaluate
from planner.plans.plan import NoPlanFitsError, Plan, header

_NONE = "none"
_EXAMPLES = (_NONE, "every-layer", "every-2", "sqrt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A present set-up beside the best plans; whole-device bytes everywhere."""

    current: str
    """The set-up: ``"every-layer"`` for example."""
    now: Plan
    """Its figures, as a plan whose budget is its own peak."""
    best: Plan
    """The best known plan at the same peak, with the proven bound."""
    budget_bytes: int | None = None
    """What the device may hold, if that was given."""
    within_budget: Plan | None = None
    """The best known plan within it."""
    no_plan_fits: NoPlanFitsError | None = None
    """Why there is none."""

    @property
    def fits(self) -> bool | None:
        """Whether the set-up keeps the budget; None if none was given."""
        return None if self.budget_bytes is None else self.now.whole_step_peak_bytes <= self.budget_bytes

    def report(self) -> dict[str, Any]:
        """Return the audit as JSON has it."""
        now = self.now
        report: dict[str, Any] = {
            **header(now),
            "current": {"name": self.current, **_way(now), "fits": self.fits},
            "same_peak": _best(self.best),
            "budget": None,
        }
        if self.budget_bytes is not None:
            report["budget"] = {
                "budget_bytes": self.budget_bytes,
                "plan": _best(self.within_budget) if self.within_budget is not None else None,
                "no_plan_fits": self.no_plan_fits.report if self.no_plan_fits is not None else None,
            }
        return report


def _way(plan: Plan) -> dict[str, Any]:
    return {
        "peak_bytes": plan.whole_step_peak_bytes,
        **attributes(plan, "overhead", "recompute_seconds", "added_seconds"),
        "host_bytes": plan.offloading.host_bytes if plan.offloading else 0,
    }


def _best(plan: Plan) -> dict[str, Any]:
    own = attributes(plan, "lower_bound_overhead", "status", "solver")
    return {"budget_bytes": plan.budget_bytes, **_way(plan), **own}


def check_current(current: str) -> None:
    """Raise UsageError unless a set-up has this name."""
    if current == _NONE or strategies.find(current) is not None:
        return
    hint = did_you_mean(current, (*_EXAMPLES, *strategies.known()), most=1)
    raise UsageError(
        f"there is no set-up {current!r}; {hint}give {', '.join(_EXAMPLES)}, or another of the strategies "
        f"({', '.join(strategies.names())})"
    )


def audit_study(study: Study, current: str, search: Search, budget: Size | None = None) -> Audit:
    """Set a present set-up beside the best plans of a captured step; see :func:`planner.audit`."""
    check_current(current)
    try:
        schedule = Schedule.keep_all(study.graph) if current == _NONE else study.strategy(current)
    except UsageError as error:
        raise UsageError(f"{error}, so {current!r} does not apply to it") from error
    setup = evaluate(
        replace(study.problem(), host=study.unlimited_host()),
        schedule,
        current,
        optimizer_peak_bytes=optimizer_peak_bytes(study.graph, study.static_memory),
    )
    audit = Audit(
        current=setup.name,
        now=_as_plan(study, setup, setup.peak_bytes),
        best=_cheapest(study, setup, setup.peak_bytes, search),
    )
    if budget is None:
        return audit
    budget_bytes = study.problem(budget).budget_bytes + study.graph.total_static_bytes
    try:
        return replace(audit, budget_bytes=budget_bytes, within_budget=_cheapest(study, setup, budget_bytes, search))
    except NoPlanFitsError as error:
        return replace(audit, budget_bytes=budget_bytes, no_plan_fits=error)


def _as_plan(study: Study, setup: Evaluated, budget_bytes: int, bound_seconds: float = 0.0) -> Plan:
    return study.as_plan(setup.schedule, setup.name, budget=budget_bytes, lower_bound_seconds=bound_seconds)


def _cheapest(study: Study, setup: Evaluated, budget_bytes: int, search: Search) -> Plan:
    """Return the cheapest known plan within a budget, maybe the set-up itself; it may offload as much."""
    fits = setup.peak_bytes <= budget_bytes
    offload = Offload(False)
    if setup.host_bytes:
        offload = Offload(host_budget=setup.host_bytes, at_least=study.least_offloaded(setup.schedule))
    try:
        found = study.plan(budget_bytes, search=replace(search, compare=False), offload=offload)
    except NoPlanFitsError as error:
        if not fits:
            raise
        return _as_plan(study, setup, budget_bytes, error.lower_bound_seconds)
    if fits and setup.added_seconds < found.added_seconds:
        return _as_plan(study, setup, budget_bytes, 0.0 if found.order else found.lower_bound_seconds)
    return found
