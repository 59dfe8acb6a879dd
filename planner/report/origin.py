"""How far to trust the report: what it stands on, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.text import Text

from planner.common.units import format_seconds
from planner.plans.plan import Plan

_SOURCES = {
    "roofline": "a data sheet's figures, which rank choices well and predict the slowdown roughly",
    "measured": "each different operation timed alone on this machine",
    "recorded": "each different operation timed alone before",
}


def render(plan: Plan) -> Group:
    """Say what costs, solver and versions the plan stands on."""
    return Group(Text("How far to trust it", style="bold"), *map(Text, statements(plan)))


def statements(plan: Plan) -> Iterator[str]:
    """Say where the numbers come from, what is assumed, and what would prove them."""
    source = _SOURCES.get(plan.cost_model.split()[0] if plan.cost_model else "", "")
    yield (
        f"The step without recompute takes {format_seconds(plan.baseline_step_seconds)} by the {plan.cost_model} cost "
        f"model of {plan.device}" + (f": {source}." if source else ".")
    )
    yield (
        f"The smallest peak known to be feasible is {plan.minimum_feasible_peak_bytes:,} bytes. Captured in "
        f"{format_seconds(plan.capture_seconds)}{f', torch {plan.torch}' if plan.torch else ''}; solved in "
        f"{format_seconds(plan.solve_seconds)} by {plan.solver} ({plan.status})."
    )
    missing = [
        what
        for kind, what in (("optimizer", "an optimizer (--optimizer)"), ("reserve", "a reserve (--reserve)"))
        if kind not in plan.static_bytes
    ]
    if missing:
        yield f"Not counted, since it was not asked for: {', '.join(missing)}."
    if plan.verification is None:
        yield "Predicted, not measured: 'verify' runs real steps and holds peak and bits against this."
