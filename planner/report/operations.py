"""FLOPs, bytes and seconds of every operation."""

from __future__ import annotations

from rich.table import Table

from planner.common.units import format_bytes, format_seconds
from planner.plans.plan import Plan
from planner.report.style import compact_count, table


def render(plan: Plan) -> Table:
    """Show every operation of the step in base order; the last row adds them up."""
    everything = ("all, each once", "", ""), plan.operations
    return table(
        f"Operations, {len(plan.operations)}",
        [*(((row.operation, row.module, row.phase), [row]) for row in plan.operations), everything],
        ("operation", lambda row: row[0][0], str),
        ("module", lambda row: row[0][1], str),
        ("phase", lambda row: row[0][2], str),
        ("FLOPs", lambda row: sum(one.flops for one in row[1]), compact_count),
        ("bytes moved", lambda row: sum(one.moved_bytes for one in row[1]), format_bytes),
        ("time", lambda row: sum(one.seconds for one in row[1]), format_seconds),
        ("runs", lambda row: sum(one.runs for one in row[1]), str),
        text_columns=3,
        bold=lambda row: row is everything,
    )
