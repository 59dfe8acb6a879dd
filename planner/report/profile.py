"""What was measured: where the step's time goes, and how far the roofline is from it."""

from __future__ import annotations

from rich.console import Console

import cost_models
from cost_models.measured import Profile
from planner.common.units import format_percent, format_seconds
from planner.report.style import cells, table
from planner.report.verdict import print_verdict

_ROWS = 15


def render(profile: Profile, path: str, console: Console) -> None:
    """Print the operators that take longest, each with all its calls."""
    try:
        rates = cost_models.get("roofline")(cost_models.device(profile.device))
    except cost_models.UnknownNameError:
        rates = None
    totals: dict[str, tuple[int, float, float]] = {}
    unmeasured = 0
    for operation in profile.operations:
        found = profile.measurements.get(operation.signature)
        if found is None:
            unmeasured += bool(operation.signature)
            continue
        count, seconds, estimated = totals.get(operation.target, (0, 0.0, 0.0))
        estimate = rates.costs([operation])[0].seconds if rates else 0.0
        totals[operation.target] = (count + 1, seconds + found.seconds, estimated + estimate)
    step_seconds = sum(seconds for _, seconds, _ in totals.values())
    left = f", {unmeasured} operations left to the roofline" if unmeasured else ""
    print_verdict(
        f"MEASURED {len(profile.measurements)} different operations of {profile.model or 'the model'} on "
        f"{profile.device} · {format_seconds(step_seconds)} a step{left} · {path}",
        console,
        style="bold green",
    )
    console.print()
    shown = table("operation", "calls", "time", "share", "roofline", title="Where the time goes", text_columns=1)
    for target, (count, seconds, estimated) in sorted(totals.items(), key=lambda item: -item[1][1])[:_ROWS]:
        share = format_percent(seconds / step_seconds) if step_seconds else "-"
        ratio = f"{estimated / seconds:.2f}x" if rates and seconds else "-"
        shown.add_row(*cells(target, str(count), format_seconds(seconds), share, ratio))
    console.print(shown)
