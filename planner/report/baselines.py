"""The plan beside what people do without a planner."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from planner.common.units import format_seconds
from planner.plans.plan import BaselineRow, Plan
from planner.report.style import cells, in_unit_of, signed_percent, table


def render(plan: Plan) -> Group | None:
    """Show the baselines: peak, whether it fits, overhead, how far above the bound, time to find it."""
    if not plan.baselines:
        return None
    shown = table("way", "peak", "fits", "overhead", "gap", "found in", title="Beside other ways")
    largest_bytes = max((row.peak_bytes or 0) for row in plan.baselines)
    notes = []
    for row in plan.baselines:
        style = "bold" if row is plan.baselines[-1] else ""
        shown.add_row(*cells(*_row(row, plan, largest_bytes), style=style))
        if row.reason:
            notes.append(Text(f"{row.name}: {row.reason}"))
    return Group(shown, *notes)


def _row(row: BaselineRow, plan: Plan, largest_bytes: int) -> list[str]:
    if row.peak_bytes is None or row.overhead is None:
        return [row.name, "-", "no", "-", "-", "-"]
    # The bound holds for plans within the budget; what breaks it may well pay less.
    gap = signed_percent(row.overhead - plan.lower_bound_overhead) if row.fits else "-"
    return [
        row.name,
        in_unit_of(row.peak_bytes, largest_bytes),
        "yes" if row.fits else "no",
        signed_percent(row.overhead),
        gap,
        format_seconds(row.seconds) if row.seconds else "-",
    ]
