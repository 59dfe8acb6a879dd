"""What-if: the curve with its knee and the user's budget, and whatever else was asked about."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from planner.analysis.trade_off.accelerators import DeviceRow
from planner.analysis.trade_off.answers import Answers
from planner.analysis.trade_off.methods import Method
from planner.analysis.trade_off.sizes import SizeAxis
from planner.analysis.trade_off.types import TradeOffCurve, TradeOffPoint
from planner.common.units import format_bytes, format_seconds
from planner.report import terminal_plot
from planner.report.style import cells, in_unit_of, signed_percent, table
from planner.report.verdict import print_verdict


def render(answers: Answers, console: Console) -> None:
    """Print the answers."""
    print_verdict(verdict(answers.curve), console, style="bold green")
    for part in _parts(answers, console.width):
        console.print()
        console.print(part)


def _parts(answers: Answers, width: int) -> Iterator[RenderableType]:
    curve = answers.curve
    yield _points(curve)
    yield terminal_plot.draw(curve, answers.methods, width=width)
    yield from further(answers)


def further(answers: Answers) -> Iterator[RenderableType]:
    """Return what is shown beside the curve."""
    curve = answers.curve
    if curve.asked is not None:
        yield Text(_asked(curve, curve.asked))
    for name, axis in (("batch sizes", answers.batch_sizes), ("sequence lengths", answers.seq_lens)):
        if axis is not None:
            yield _sizes(name, axis)
            yield Text(_largest(axis))
    if answers.devices:
        yield _devices(answers.devices)
    if answers.methods:
        yield _methods(answers.methods)
        yield from (Text(f"{method.name}: {method.reason}") for method in answers.methods if method.reason)
    yield Text(_origin(answers))


def verdict(curve: TradeOffCurve) -> str:
    """Say in one line from where to where the curve goes, and where it bends."""
    ends = (
        f"from {format_bytes(curve.minimum_feasible_peak_bytes)}, the smallest feasible budget, "
        f"to {format_bytes(curve.baseline_peak_bytes)}, the peak without recompute"
    )
    if curve.lossy:
        ends += " · LOSSY: values wait on the host as bfloat16, gradients are not bit-equal"
    knee = curve.knee
    if knee is None or knee.overhead is None:
        return f"TRADE-OFF {ends}"
    return f"KNEE at {format_bytes(knee.budget_bytes)}: {signed_percent(knee.overhead)} step time · {ends}"


def _points(curve: TradeOffCurve) -> RenderableType:
    offloads = curve.host_budget_bytes is not None
    columns = ["budget", "peak", *(["host"] if offloads else []), "overhead", "bound"]
    shown = table(*columns, "found by", "status", "", title="Overhead over budget")
    knee, asked = curve.knee, curve.asked
    beside = [asked] if asked is not None and asked.budget_bytes not in {p.budget_bytes for p in curve.points} else []
    points = sorted([*curve.points, *beside], key=lambda point: point.budget_bytes)
    largest_bytes = max((point.budget_bytes for point in points), default=0)
    for point in points:
        marks = []
        if knee is not None and point.budget_bytes == knee.budget_bytes:
            marks.append("knee")
        if asked is not None and point.budget_bytes == asked.budget_bytes:
            marks.append("your budget")
        shown.add_row(
            *cells(
                in_unit_of(point.budget_bytes, largest_bytes),
                "-" if point.predicted_peak_bytes is None else in_unit_of(point.predicted_peak_bytes, largest_bytes),
                *([in_unit_of(point.host_bytes, largest_bytes)] if offloads else []),
                _percent(point.overhead),
                _rounded_down(point.lower_bound_overhead),
                point.solver or "-",
                point.status,
                ", ".join(marks),
                style="bold" if marks else "",
            )
        )
    return shown


def _asked(curve: TradeOffCurve, asked: TradeOffPoint) -> str:
    """Say what the user's budget costs and what one more GiB buys."""
    budget = format_bytes(asked.budget_bytes)
    if asked.overhead is None:
        smallest = format_bytes(curve.minimum_feasible_peak_bytes)
        return f"Your budget of {budget} does not fit: the smallest feasible one is {smallest}."
    said = f"Your budget of {budget} costs {_percent(asked.overhead)} step time"
    if asked.overhead > 0:
        said += f" (no plan can pay less than {_rounded_down(asked.lower_bound_overhead)})"
    bought = curve.bought_by_one_gib
    if bought is None or curve.asked_more is None:
        return f"{said}."
    if asked.overhead <= 0:
        return f"{said}: more memory buys nothing."
    return f"{said}; 1 GiB more buys {100 * bought:.1f} points: {_percent(curve.asked_more.overhead)}."


def _sizes(name: str, axis: SizeAxis) -> RenderableType:
    title = f"Other {name} at {format_bytes(axis.budget_bytes)}"
    shown = table("size", "peak", "overhead", "bound", "step", f"{axis.unit}/s", "", title=title)
    largest, best = axis.largest, axis.best
    for row in axis.rows:
        outcome = row.outcome
        marks = [mark for mark, marked in (("largest", largest), ("fastest", best)) if row is marked]
        needed_bytes = outcome.predicted_peak_bytes or outcome.minimum_feasible_peak_bytes
        shown.add_row(
            *cells(
                str(row.size),
                format_bytes(needed_bytes) if outcome.fits else f"needs {format_bytes(needed_bytes)}",
                _percent(outcome.overhead),
                _rounded_down(outcome.lower_bound_overhead),
                "-" if outcome.step_seconds is None else format_seconds(outcome.step_seconds),
                "-" if row.per_second is None else _rate(row.per_second),
                ", ".join(marks),
                style="bold" if marks else "",
            )
        )
    return shown


def _largest(axis: SizeAxis) -> str:
    """Say which size is the largest, and which trains most."""
    budget = format_bytes(axis.budget_bytes)
    largest, best = axis.largest, axis.best
    if not axis.rows:
        return f"No {axis.name} was looked at."
    if largest is None or best is None or best.per_second is None:
        return f"No {axis.name} fits {budget}, not even {axis.rows[0].size}."
    seen = "largest that fits" if axis.is_complete else "largest seen so far that fits"
    return (
        f"The {seen} {budget} is a {axis.name} of {largest.size}; "
        f"{best.size} trains most: {_rate(best.per_second)} {axis.unit} a second."
    )


def _devices(rows: tuple[DeviceRow, ...]) -> RenderableType:
    shown = table("device", "memory", "fits", "without recompute", "overhead", "bound", "step", title="Devices")
    for row in rows:
        outcome = row.outcome
        shown.add_row(
            *cells(
                row.device,
                format_bytes(row.memory_bytes),
                "yes" if outcome.fits else "no",
                format_bytes(row.baseline_peak_bytes),
                _percent(outcome.overhead),
                _rounded_down(outcome.lower_bound_overhead),
                "-" if outcome.step_seconds is None else format_seconds(outcome.step_seconds),
            )
        )
    return shown


def _methods(methods: tuple[Method, ...]) -> RenderableType:
    """Show each way's points."""
    shown = table("way", "budget", "peak", "overhead", "bound", title="Solvers and other ways")
    largest_bytes = max((point.budget_bytes for method in methods for point in method.points), default=0)
    for method in methods:
        for point in method.points:
            peak = point.predicted_peak_bytes
            shown.add_row(
                *cells(
                    method.name,
                    in_unit_of(point.budget_bytes, largest_bytes),
                    "-" if peak is None else in_unit_of(peak, largest_bytes),
                    _percent(point.overhead),
                    _rounded_down(point.lower_bound_overhead),
                )
            )
    return shown


def _origin(answers: Answers) -> str:
    curve = answers.curve
    left = "" if not answers.interrupted else " Interrupted: this is what was done by then."
    if curve.host_budget_bytes is not None:
        left = f" Up to {format_bytes(curve.host_budget_bytes)} may wait in the host's memory.{left}"
    return (
        f"The step without recompute takes {format_seconds(curve.baseline_step_seconds)} by the {curve.cost_model} "
        f"cost model of {curve.device}; torch {curve.torch}.{left}"
    )


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else signed_percent(ratio)


def _rounded_down(bound: float | None) -> str:
    """Return a bound rounded down, so that it stays true."""
    return "-" if bound is None else signed_percent(math.floor(bound * 1000 + 1e-6) / 1000)


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"
