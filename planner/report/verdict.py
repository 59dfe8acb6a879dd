"""The first line: does it fit, what does it cost, how good is that."""

from __future__ import annotations

from typing import Any

from planner.common.units import format_bytes, in_unit_of
from planner.plans.plan import PeakLocation, Plan
from planner.report.style import at_least_percent, signed_percent


def verdict(plan: Plan) -> str:
    """Return the verdict on a plan as one line."""
    away = f" · {format_bytes(plan.offloading.host_bytes)} offloaded" if plan.offloading else ""
    if plan.offloading and plan.offloading.rounded:
        away += " LOSSY: rounded to bfloat16, gradients are not bit-equal"
    proven = [bound(plan)] if plan.added_seconds > 0 else []
    against = ""
    if plan.eager is not None:
        against = " against eager"
        proven = [f"recompute {signed_percent(plan.overhead)}", *proven] if proven else []
    said = f" ({', '.join(proven)})" if proven else ""
    cost = f"{signed_percent(plan.over_eager(plan.overhead))} step time{against}{said}"
    return f"{fits(plan.whole_step_peak_bytes, plan.budget_bytes)} · {cost} · {layers(plan)}{away}"


def fits(peak_bytes: int, budget_bytes: int) -> str:
    """Say that a peak keeps a budget, in the unit of the budget."""
    peak, budget = (in_unit_of(size, budget_bytes, digits=1) for size in (peak_bytes, budget_bytes))
    return f"FITS {peak.split()[0]} of {budget}"


def bound(plan: Plan) -> str:
    """Say what is proven of all plans within the budget."""
    if plan.lower_bound_seconds <= 0 < plan.added_seconds:
        return "no lower bound proven"
    return f"no plan can pay less than {at_least_percent(plan.lower_bound_overhead)}"


def layers(plan: Plan) -> str:
    """Say how many layers recompute; blocks count if the model has any, other modules if not."""
    blocks = [layer for layer in plan.placement if layer.block]
    counted = blocks or [layer for layer in plan.placement if layer.module]
    recomputed = sum(layer.recomputed > 0 for layer in counted)
    if plan.recompute_seconds <= 0 and not plan.recomputations:
        return "nothing recomputed"
    beside = sum(layer.recomputed > 0 for layer in plan.placement) - recomputed
    text = f"{recomputed} of {len(counted)} {'layers' if blocks else 'modules'} recomputed"
    return text if recomputed or not beside else f"{text}, {beside} other modules"


def infeasible_verdict(report: dict[str, Any]) -> str:
    """Return the verdict on a budget that no plan fits as one line."""
    where = PeakLocation(**report["peak_at"])
    smallest_bytes = report["minimum_feasible_peak_bytes"]
    return (
        f"DOES NOT FIT {format_bytes(report['budget_bytes'])} · "
        f"smallest feasible budget {format_bytes(smallest_bytes)} ({smallest_bytes} bytes) · bound by {where}"
    )
