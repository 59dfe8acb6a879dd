"""The answers to a what-if as one HTML page that needs nothing beside itself: the curve, and every plan on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.analysis.trade_off.answers import Answers
from planner.common.units import format_bytes
from planner.plans.plan import Plan, Timeline
from planner.report.page import charts, fill
from planner.report.peak import in_order
from planner.report.style import at_least_percent, signed_percent
from planner.report.verdict import recomputed
from planner.report.what_if import further, lines, marks, verdict

_KINDS = {"overhead": "after", "lower bound": "bound"}
"""Classes of what is drawn as a line; whatever else is another way."""


def what_if_page(answers: Answers, use_it: Callable[[int], str] = "planner.auto_wrap(model, budget={})".format) -> str:
    """Return the page: the curve with its points, the plan of each, then whatever else was asked.

    It shows for each plan the call that makes it, which ``use_it`` writes for a budget.
    """
    scale = _Scale(answers)
    return fill(
        "what_if.html.j2",
        curve=answers.curve,
        said=verdict(answers.curve),
        marks=marks,
        scale=scale,
        chart=_chart(answers, scale),
        further=[_part(part) for part in further(answers)],
        data=_data(answers, use_it),
    )


class _Scale:
    """Where a budget and an overhead stand in the chart, as shares of its width and height."""

    def __init__(self, answers: Answers) -> None:
        drawn = list(lines(answers.curve, answers.methods))
        gibibytes = [x for line in drawn for x in line.gibibytes]
        self.most_bytes = 1.05 * max([answers.curve.baseline_peak_bytes, *(2**30 * x for x in gibibytes)])
        self.highest = 1.15 * max([1.0, *(y for line in drawn for y in line.percents)]) / 100

    def at(self, size_bytes: float, overhead: float) -> tuple[float, float]:
        return size_bytes / self.most_bytes, overhead / self.highest


def _chart(answers: Answers, scale: _Scale) -> dict[str, Any]:
    curve = answers.curve
    joined, points = [], []
    for line in lines(curve, answers.methods):
        places = [scale.at(2**30 * x, y / 100) for x, y in zip(line.gibibytes, line.percents, strict=True)]
        if line.is_curve and places:
            steps = " L".join(f"{1000 * x:.1f} {300 * (1 - y):.1f}" for x, y in places)
            joined.append({"name": line.name, "kind": _KINDS.get(line.name, "other"), "path": f"M{steps}"})
        for (x, y), percent in zip([] if line.is_curve else places, line.percents, strict=False):
            title = f"{line.name}: {format_bytes(round(x * scale.most_bytes))}, {signed_percent(percent / 100)}"
            points.append({"x": x, "y": y, "mark": line.marker, "name": line.name, "title": title})
    return {
        "lines": joined,
        "points": points,
        "asked": None if curve.asked is None else min(1.0, curve.asked.budget_bytes / scale.most_bytes),
        "across": charts.size_ticks(scale.most_bytes),
        "up": charts.percent_ticks(scale.highest),
    }


def _part(part: RenderableType) -> dict[str, Any]:
    """Return a part of the terminal's answer as data: a table, or lines of text."""
    if not isinstance(part, Table):
        return {"title": "", "head": [], "rows": [], "lines": str(part).splitlines()}
    columns = [[_text(cell) for cell in column.cells] for column in part.columns]
    head = [(_text(column.header), column.justify == "right") for column in part.columns]
    return {"title": _text(part.title or ""), "head": head, "rows": list(zip(*columns, strict=True)), "lines": []}


def _text(content: RenderableType) -> str:
    return content.plain if isinstance(content, Text) else str(content)


def _data(answers: Answers, use_it: Callable[[int], str]) -> dict[str, Any]:
    """Return what the script shows of each plan; a plan without its step over time is left out."""
    number_of = {point.budget_bytes: number for number, point in enumerate(answers.curve.with_asked)}
    plans = [plan for plan in answers.plans if plan.details is not None and plan.budget_bytes in number_of]
    if not plans:
        return {"plans": []}
    lines_of = [plan.details.after for plan in plans if plan.details is not None]
    before = next(plan.details.before for plan in plans if plan.details is not None)
    layers = [layer for plan in plans for layer in plan.placement]
    best = answers.curve.asked or answers.curve.knee
    chosen = next((i for i, plan in enumerate(plans) if best and plan.budget_bytes == best.budget_bytes), 0)
    return {
        "plans": [
            {**_plan(plan, line, use_it), "row": number_of[plan.budget_bytes]}
            for plan, line in zip(plans, lines_of, strict=True)
        ],
        "chosen": chosen,
        "layers": [layer.module or "(model)" for layer in plans[0].placement],
        "kinds": [kind for kind, _ in in_order({kind: 1 for plan in plans for kind in plan.anatomy})],
        "points": _points(before),
        "step_seconds": before.step_seconds,
        "end_seconds": max(line.step_seconds for line in (before, *lines_of)),
        "top_bytes": max(line.peak_bytes for line in (before, *lines_of)) * 1.02,
        "tallest": max((max(x.saved_bytes, 0) + max(x.freed_bytes, 0) for x in layers), default=0) or 1,
        "longest": max((layer.added_seconds for layer in layers), default=0.0) or 1.0,
    }


def _plan(plan: Plan, line: Timeline, use_it: Callable[[int], str]) -> dict[str, Any]:
    return {
        "budget_bytes": plan.budget_bytes,
        "budget": format_bytes(plan.budget_bytes),
        "peak": format_bytes(plan.peak_bytes),
        "beside": f"{format_bytes(plan.baseline_peak_bytes)} without recompute",
        "overhead": signed_percent(plan.overhead),
        "bound": f"no plan below {at_least_percent(plan.lower_bound_overhead)}",
        "again": recomputed(plan).removesuffix(" recomputed"),
        "found": f"found by {plan.solver} ({plan.status})",
        "code": use_it(plan.budget_bytes),
        "anatomy": in_order(plan.anatomy),
        "layers": [[x.saved_bytes, max(x.freed_bytes, 0), x.added_seconds] for x in plan.placement],
        "points": _points(line),
        "step_seconds": line.step_seconds,
    }


def _points(line: Timeline) -> list[tuple[float, int]]:
    return [(round(point.seconds, 9), point.size_bytes) for point in line.points]
