"""FLOPs, bytes and seconds of every operation."""

from __future__ import annotations

from rich.table import Table

from planner.common.units import format_bytes, format_seconds
from planner.plans.plan import Plan
from planner.report.style import cells, compact_count, table


def render(plan: Plan) -> Table:
    """Show every operation of the step in base order; the last row adds them up."""
    shown = table(
        "operation", "module", "phase", "FLOPs", "bytes moved", "time", "runs",
        title=f"Operations, {len(plan.operations)}", text_columns=3,
    )  # fmt: skip
    for row in plan.operations:
        shown.add_row(
            *cells(
                row.operation, row.module, row.phase, compact_count(row.flops), format_bytes(row.moved_bytes),
                format_seconds(row.seconds), str(row.runs),
            )
        )  # fmt: skip
    shown.add_row(
        *cells(
            "all, each once", "", "",
            compact_count(sum(row.flops for row in plan.operations)),
            format_bytes(sum(row.moved_bytes for row in plan.operations)),
            format_seconds(sum(row.seconds for row in plan.operations)),
            str(sum(row.runs for row in plan.operations)),
            style="bold",
        )
    )  # fmt: skip
    return shown
