"""The first line: does it fit, what does it cost, how good is that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from planner.common.units import format_bytes, in_unit_of
from planner.plans.plan import PeakLocation, Plan
from planner.report.style import at_least_percent, counted, signed_percent


def verdict(plan: Plan) -> str:
    """Return the verdict on a plan as one line."""
    away = f" · {format_bytes(plan.offloading.host_bytes)} offloaded" if plan.offloading else ""
    if plan.offloading and plan.offloading.rounded:
        away += " LOSSY: rounded to bfloat16, gradients are not bit-equal"
    against = " vs eager" if plan.eager is not None else ""
    proven = f" ({bound(plan)})" if plan.added_seconds > 0 else ""
    cost = f"{signed_percent(plan.over_eager(plan.overhead))} step time{against}{proven}"
    return f"{fits(plan.whole_step_peak_bytes, plan.budget_bytes)} · {cost} · {again([plan])}{away}"


def fits(peak_bytes: int, budget_bytes: int) -> str:
    """Say that a peak keeps a budget, in the unit of the budget."""
    peak, budget = (in_unit_of(size, budget_bytes, digits=1) for size in (peak_bytes, budget_bytes))
    return f"FITS {peak.split()[0]} of {budget}"


def bound(plan: Plan) -> str:
    """Say what is proven of all plans within the budget, over the same step as the verdict's step time."""
    if plan.lower_bound_seconds <= 0 < plan.added_seconds:
        return "no lower bound proven"
    plans = "plan in this order" if plan.order else "plan"
    return f"no {plans} below {at_least_percent(plan.over_eager(plan.lower_bound_overhead))}"


def order_saves(plan: Plan) -> str:
    """Say what it saves that operations run in another order than they were captured in; nothing if they do not."""
    captured = plan.captured_order
    if captured is None:
        return ""
    if captured.recompute_seconds is not None:
        without = plan.over_eager(plan.relative(captured.recompute_seconds))
        saved = f"{signed_percent(without)} step time in the captured order"
    elif plan.added_seconds > 0:
        saved = "no plan that fits was found in the captured order"
    else:
        saved = f"the captured order needs {format_bytes(plan.baseline_peak_bytes)} without recompute"
    return f"{counted(captured.moved, 'operation')} moved within data dependencies: {saved}"


def render_order(plan: Plan) -> Text | None:
    """Say so in a line of its own."""
    saved = order_saves(plan)
    return Text(f"Order: {saved}") if saved else None


def again(plans: Sequence[Plan]) -> str:
    """Say how many operations run again in one plan, or in those of all stages."""
    count = sum(len(operations) for plan in plans for operations in plan.recomputations.values())
    if not count:
        return "nothing runs again"
    return f"{counted(count, 'operation')} {'runs' if count == 1 else 'run'} again"


def infeasible_verdict(report: dict[str, Any]) -> str:
    """Return the verdict on a budget that no plan fits as one line."""
    where = PeakLocation(**report["peak_at"])
    smallest_bytes = report["minimum_feasible_peak_bytes"]
    none_below = none_needs_less(report["proven_minimum_peak_bytes"], smallest_bytes)
    return (
        f"DOES NOT FIT {format_bytes(report['budget_bytes'])} · smallest budget known to fit "
        f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes{none_below}) · bound by {where}"
    )


def none_needs_less(proven_bytes: int, smallest_bytes: int) -> str:
    """Say what is proven of the smallest budget, if that is less than the smallest that is known."""
    return f", none below {format_bytes(proven_bytes)}" if 0 < proven_bytes < smallest_bytes else ""
