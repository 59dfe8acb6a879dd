"""The answers to a what-if as one HTML page that needs nothing beside itself."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from planner.analysis.trade_off.answers import Answers
from planner.common.units import format_bytes
from planner.report.curve_chart import lines
from planner.report.page import charts, fill, resource
from planner.report.style import signed_percent
from planner.report.what_if import further, verdict

_WIDTH = 110
"""Columns of what is shown as text."""


def what_if_page(answers: Answers) -> str:
    """Return the page: the curve with its points, then whatever else was asked about."""
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, color_system=None)
    for part in further(answers):
        console.print(part)
        console.print()
    return fill(
        "what_if.html.j2",
        {
            "css": resource("page.css"),
            "curve": answers.curve,
            "verdict": verdict(answers.curve),
            "chart": _chart(answers),
            "rest": text.getvalue().rstrip(),
        },
    )


def _chart(answers: Answers) -> dict[str, Any]:
    curve = answers.curve
    drawn = list(lines(curve, answers.methods))
    most_bytes = 1.05 * max([curve.baseline_peak_bytes, *(2**30 * x for line in drawn for x in line.gibibytes)])
    highest = 1.15 * max([1.0, *(y for line in drawn for y in line.percents)]) / 100
    joined, points = [], []
    for line in drawn:
        at = zip(line.gibibytes, line.percents, strict=True)
        places = [(2**30 * gibibytes / most_bytes, percent / 100 / highest) for gibibytes, percent in at]
        if line.is_curve and places:
            steps = " L".join(f"{1000 * x:.1f} {300 * (1 - y):.1f}" for x, y in places)
            joined.append({"name": line.name, "path": f"M{steps}"})
        for (x, y), percent in zip([] if line.is_curve else places, line.percents, strict=False):
            title = f"{line.name}: {format_bytes(round(x * most_bytes))}, {signed_percent(percent / 100)}"
            points.append({"x": x, "y": y, "mark": line.marker, "title": title})
    return {
        "lines": joined,
        "points": points,
        "asked": None if curve.asked is None else min(1.0, curve.asked.budget_bytes / most_bytes),
        "across": charts.size_ticks(most_bytes),
        "up": charts.percent_ticks(highest),
    }
