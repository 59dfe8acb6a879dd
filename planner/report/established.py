"""What established systems do with a step, beside the best plans."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.established import NEAR, Established, Standing
from planner.report.style import at_least_percent, cells, in_unit_of, signed_percent, table
from planner.report.verdict import print_verdict
from planner.units import format_bytes, format_seconds


def render(established: Established, console: Console) -> None:
    """Print the comparison."""
    print_verdict(answer(established), console, style="bold")
    if established.rows:
        console.print()
        console.print(_ways(established))
    for line in _lines(established):
        console.print(Text(line))


def answer(established: Established) -> str:
    """Give the answer as one line."""
    rows = established.rows
    if not rows:
        return "no established way applies to this model"
    near = [row for row in rows if row.excess <= NEAR]
    points = f"{NEAR * 100:.0f} points"
    ways = f"{len(rows)} established way{'s' if len(rows) > 1 else ''}"
    closest, farthest = min(rows, key=lambda row: row.excess), max(rows, key=lambda row: row.excess)
    if not near:
        return f"of {ways} none is within {points} of the best plan at its peak; the closest is {_pays(closest)}"
    verb = "is" if len(near) == 1 else "are"
    how_many = f"of {ways} {len(near)} {verb} within {points} of the best plan at the same peak"
    return how_many if len(near) == len(rows) else f"{how_many}; the farthest is {_pays(farthest)}"


def _pays(row: Standing) -> str:
    return f"{row.name}, {signed_percent(row.overhead)} where {signed_percent(row.best_overhead)} would do"


def _ways(established: Established) -> Table:
    shown = table("strategy", "peak", "pays", "best", "bound", "gap", title="Each with the best plan at its own peak")
    largest_bytes = max(row.peak_bytes for row in established.rows)
    for row in established.rows:
        shown.add_row(
            *cells(
                row.name,
                in_unit_of(row.peak_bytes, largest_bytes),
                signed_percent(row.overhead),
                signed_percent(row.best_overhead),
                at_least_percent(row.lower_bound_overhead),
                signed_percent(row.gap),
            )
        )
    return shown


def _lines(established: Established) -> list[str]:
    return [
        *(f"{name}: {reason}" for name, reason in established.absent.items()),
        f"Without recompute the peak is {format_bytes(established.baseline_peak_bytes)}; overhead is of that step, "
        f"{format_seconds(established.baseline_step_seconds)} by the {established.cost_model} cost model of "
        f"{established.device or 'the device'}. Gap is what a way pays above the proven lower bound.",
    ]
