"""Where the time went that planning took."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from planner.common.timings import STAGES
from planner.common.units import format_seconds
from planner.report.style import cells, table


def render(seconds: Mapping[str, float], console: Console) -> None:
    """Print the seconds of each stage that ran, and their sum."""
    shown = table("stage", "time", title="Where the time went")
    for stage in STAGES:
        if stage in seconds:
            shown.add_row(*cells(stage, format_seconds(seconds[stage])))
    shown.add_row(*cells("all", format_seconds(sum(seconds.values())), style="bold"))
    console.print()
    console.print(shown)
