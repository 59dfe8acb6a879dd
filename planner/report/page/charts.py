"""Coordinates of the charts on the page, as shares of their width or height; the template draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.common.units import format_bytes, format_seconds, in_unit_of
from planner.plans.plan import LayerPlacement, Plan, StepDetails, Timeline
from planner.report.comparisons import methods
from planner.report.layers import Module
from planner.report.style import signed_percent

WIDTH, HEIGHT = 1000, 300
"""Of a drawing's own coordinates; it is stretched to the room there is."""

_ROUND = [digit * 10**zeros for zeros in range(13) for digit in (1, 2, 5)]


def timeline(plan: Plan, details: StepDetails) -> dict[str, Any]:
    """Return the outlines of memory over time, before and after, and what is marked beside them."""
    before, after = details.before, details.after
    end_seconds = max(before.step_seconds, after.step_seconds) or 1.0
    top_bytes = 1.05 * max(before.peak_bytes, after.peak_bytes)
    budget = plan.budget_bytes / top_bytes
    return {
        "before": _outline(before, end_seconds, top_bytes),
        "after": _outline(after, end_seconds, top_bytes),
        "resident": plan.total_static_bytes / top_bytes,
        "budget": budget if budget <= 1 else None,
        "top_bytes": top_bytes,
        "ticks": size_ticks(top_bytes),
        "backward": after.backward_seconds / end_seconds,
        "end": format_seconds(end_seconds),
    }


def _outline(line: Timeline, end_seconds: float, top_bytes: float) -> str:
    """Return the path of a step function, closed along the bottom."""
    parts = [f"M0,{HEIGHT}"]
    ends = [*(point.seconds for point in line.points[1:]), line.step_seconds]
    for point, end in zip(line.points, ends, strict=True):
        parts.append(f"V{HEIGHT * (1 - point.size_bytes / top_bytes):.1f}H{WIDTH * end / end_seconds:.1f}")
    return "".join((*parts, f"V{HEIGHT}Z"))


def size_ticks(top_bytes: float) -> list[dict[str, Any]]:
    """Return a few round sizes from zero up: labels, and where they stand, as shares of the axis."""
    unit = next((factor for factor in (2**30, 2**20, 2**10) if top_bytes >= 2 * factor), 1)
    sizes = [step * unit for step in _steps(top_bytes / unit)]
    return [{"share": size / top_bytes, "label": in_unit_of(size, int(top_bytes), digits=0)} for size in sizes]


def percent_ticks(top: float) -> list[dict[str, Any]]:
    """Return a few round percentages from zero up, alike."""
    return [{"share": one / 1000 / top, "label": signed_percent(one / 1000)} for one in _steps(1000 * top)]


def _steps(top: float) -> range:
    """Return whole numbers from zero up to a number, seven at most, in round steps."""
    step = next(step for step in _ROUND if top <= 6 * step)
    return range(0, int(top) + 1, step)


def strip(layers: Sequence[LayerPlacement]) -> list[dict[str, float]]:
    """Return for each layer how high its bars stand: saved, freed, and time added."""
    tallest = max((max(layer.saved_bytes, 0) + max(layer.freed_bytes, 0) for layer in layers), default=0) or 1
    longest = max((layer.added_seconds for layer in layers), default=0.0) or 1.0
    return [
        {
            "saved": layer.saved_bytes / tallest,
            "freed": max(layer.freed_bytes, 0) / tallest,
            "added": layer.added_seconds / longest,
        }
        for layer in layers
    ]


def flame(name: str, module: Module) -> dict[str, Any]:
    """Return a module with its parts: what is saved and freed, which share is saved, and a width in bytes of both."""
    parts = [flame(part, inside) for part, inside in module.parts.items()]
    layers, own = module.all(), module.own
    saved_bytes = sum(layer.saved_bytes for layer in layers)
    freed_bytes = sum(layer.freed_bytes for layer in layers)
    added = format_seconds(sum(layer.added_seconds for layer in layers))
    own_bytes = own.saved_bytes + max(own.freed_bytes, 0) if own is not None else 0
    return {
        "name": name,
        "text": f"saves {format_bytes(saved_bytes)}, frees {format_bytes(freed_bytes)}, adds {added}",
        "saved": saved_bytes / (saved_bytes + max(freed_bytes, 0) or 1),
        "width": own_bytes + sum(part["width"] for part in parts),
        "parts": [part for part in parts if part["width"]],
    }


def trade_off(plan: Plan) -> dict[str, Any]:
    """Return the methods beside each other: peak to the right, overhead upwards, the plan the last."""
    rows = list(methods(plan))
    most_bytes = 1.08 * max([plan.budget_bytes, *(row.peak_bytes or 0 for row in rows)])
    highest = 1.15 * max([0.01, *(row.overhead or 0.0 for row in rows)])
    return {
        "points": [
            {
                "row": row,
                "peak": None if row.peak_bytes is None else in_unit_of(row.peak_bytes, plan.baseline_peak_bytes),
                "x": None if row.peak_bytes is None else row.peak_bytes / most_bytes,
                "y": None if row.overhead is None else max(row.overhead, 0.0) / highest,
            }
            for row in rows
        ],
        "budget": plan.budget_bytes / most_bytes,
        "bound": max(plan.over_eager(plan.lower_bound_overhead), 0.0) / highest,
        "across": size_ticks(most_bytes),
        "up": percent_ticks(highest),
    }
