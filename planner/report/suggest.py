"""Budgets to choose from, where none was named."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from planner.analysis.trade_off.suggest import Suggestions
from planner.common.units import format_bytes
from planner.report.style import print_report, signed_percent, sizes, table


def render(found: Suggestions, typed: str, console: Console) -> None:
    """Print the budgets, and what was typed with each of them added."""
    line = f"NO BUDGET GIVEN · the model's own step takes {format_bytes(found.own_peak_bytes)} on {found.device}"
    if found.memory_bytes < found.smallest_bytes:
        line += f", and no plan fits its {format_bytes(found.memory_bytes)}"
    shown = table(
        "Budgets to choose from",
        found.budgets,
        ("budget", lambda row: row.name, str),
        ("size", lambda row: row.budget_bytes, sizes(row.budget_bytes for row in found.budgets)),
        ("step time", lambda row: row.step_time, signed_percent),
    )
    lines = [Text(f"{typed} --budget {row.text}") for row in found.budgets]
    print_report(console, line, shown, Text("\n").join(lines))
