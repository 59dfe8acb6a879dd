"""Predicted against measured, once real steps have been run."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from planner.plans.plan import Plan
from planner.report.style import cells, signed_percent, table


def render(plan: Plan) -> Group | None:
    """Show what real steps showed, if they have been run."""
    measured = plan.verification
    if measured is None:
        return None
    shown = table("", "predicted", "measured", "difference", title=f"Measured in {measured.steps} real steps")
    _peak_row(shown, "peak with the plan, bytes", plan.peak_bytes, measured.peak_bytes)
    _peak_row(shown, "peak without it, bytes", plan.baseline_peak_bytes, measured.baseline_peak_bytes)
    overheads = (plan.overhead, measured.overhead)
    points = f"{(measured.overhead - plan.overhead) * 100:+.1f} points"
    shown.add_row(*cells("overhead", *map(signed_percent, overheads), points))
    agree = (
        ("loss", measured.loss_equal),
        ("gradients", measured.gradients_bitwise_equal),
        ("buffers", measured.buffers_equal),
    )
    words = ", ".join(f"{name} {'equal' if equal else 'DIFFERENT'}" for name, equal in agree)
    exact = Text(f"Bit for bit against the step without recompute: {words}", style="" if measured.agrees else "red")
    if measured.rounding_error is not None:
        exact.append(
            ". Values are rounded on their way to the host, so no bits are promised: loss and gradients are off by up "
            f"to {measured.rounding_error:.2g} of their length ({measured.tolerance:g} is allowed)"
        )
    elif measured.tolerance:
        kept = "they stay within" if measured.agrees else "they DO NOT stay within"
        exact.append(f". This runtime promises no bits: {kept} {measured.tolerance:g} of each other")
    if measured.from_one_piece:
        exact.append(f". From the step in one piece they are {measured.from_one_piece:.1g} of their length away")
    return Group(shown, exact, *(Text(f"differs: {line}") for line in measured.differences))


def _peak_row(shown: Table, name: str, predicted_bytes: int, measured_bytes: int) -> None:
    difference = f"{measured_bytes - predicted_bytes:+,} bytes"
    shown.add_row(*cells(name, f"{predicted_bytes:,}", f"{measured_bytes:,}", difference))
