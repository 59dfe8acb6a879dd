"""How the plan was made, in one sentence."""

from __future__ import annotations

from rich.text import Text

from planner.plan_types import Plan
from planner.units import format_seconds


def render(plan: Plan) -> Text:
    """Say what costs, solver and versions the plan stands on."""
    step = f"The step without recompute takes {format_seconds(plan.baseline_step_seconds)} by the {plan.cost_model}"
    torch = f", torch {plan.torch}" if plan.torch else ""
    return Text(
        f"{step} cost model of {plan.device}; the smallest peak known to be feasible is "
        f"{plan.minimum_feasible_peak_bytes:,} bytes. Captured in {format_seconds(plan.capture_seconds)}{torch}; "
        f"solved in {format_seconds(plan.solve_seconds)} by {plan.solver} ({plan.status})."
    )
