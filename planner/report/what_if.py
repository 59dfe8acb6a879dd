"""Print a what-if: the curve with its knee and the budget asked about, then the other axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console, RenderableType
from rich.text import Text

from planner.analysis.trade_off.answers import Answers, Method, is_strategy
from planner.analysis.trade_off.axes import DeviceRow, Outcome, SizeAxis, SizeRow
from planner.analysis.trade_off.curve import RECOMPUTE_ALONE
from planner.analysis.trade_off.types import TradeOffCurve, TradeOffPoint
from planner.common.units import format_bytes, format_seconds
from planner.report.style import Column, at_least_percent, print_report, signed_percent, sizes, table, yes_or_no
from planner.report.verdict import none_needs_less

_CURVE, _BOUND = "hd", "."
_METHODS = "+x*#%&$@"
_WIDTH_AT_MOST, _HEIGHT = 100, 18

_BESIDE_LEGEND, _ROWS_OF_LEGEND = 6, 2
"""Rows that the legend cannot have, and what each of its entries takes: without room it is left out."""

_OF_OUTCOMES: tuple[Column, ...] = (
    ("overhead", lambda row: row.outcome.overhead, signed_percent),
    ("bound", lambda row: row.outcome.lower_bound_overhead, at_least_percent),
    ("step", lambda row: row.outcome.step_seconds, format_seconds),
)
"""Columns of a table whose rows have an outcome."""


def render(answers: Answers, console: Console) -> None:
    """Print the answers."""
    curve = answers.curve
    drawn = draw(curve, answers.methods, width=console.width)
    print_report(console, verdict(curve), _points(curve), drawn, *further(answers), style="bold green")


def further(answers: Answers) -> Iterator[RenderableType]:
    """Return what is shown beside the curve."""
    curve = answers.curve
    if curve.asked is not None:
        yield Text(_asked(curve, curve.asked))
    for name, axis in (("batch sizes", answers.curve.batch_sizes), ("sequence lengths", answers.curve.seq_lens)):
        if axis is not None:
            yield _sizes(name, axis)
            yield Text(_largest(axis))
    if answers.devices:
        yield _devices(answers.devices)
    if answers.methods:
        yield _methods(answers.methods)
        yield from (Text(f"{method.name}: {method.reason}") for method in answers.methods if method.reason)
    if curve.host_budget_bytes is not None and any(method.name == RECOMPUTE_ALONE for method in answers.methods):
        until = answers.offload_helps_to_bytes
        where = "at no budget" if until is None else f"up to a budget of {format_bytes(until)}"
        yield Text(f"Offload saves more than half a point of the step {where}.")
    yield Text(_origin(answers.curve))


def verdict(curve: TradeOffCurve) -> str:
    """Say in one line from where to where the curve goes, and where it bends."""
    ends = (
        f"from {format_bytes(curve.minimum_feasible_peak_bytes)}, the smallest budget known to fit"
        f"{none_needs_less(curve.proven_minimum_peak_bytes, curve.minimum_feasible_peak_bytes)}, "
        f"to {format_bytes(curve.baseline_peak_bytes)}, the peak without recompute"
    )
    knee = curve.knee
    if knee is None or knee.overhead is None:
        return f"TRADE-OFF {ends}"
    return f"KNEE at {format_bytes(knee.budget_bytes)}: {signed_percent(knee.overhead)} step time · {ends}"


def marks(curve: TradeOffCurve, point: TradeOffPoint) -> str:
    """Say what is special about a point."""
    found = (("knee", curve.knee), ("your budget", curve.asked))
    return ", ".join(mark for mark, at in found if at is not None and at.budget_bytes == point.budget_bytes)


def _points(curve: TradeOffCurve) -> RenderableType:
    points = curve.with_asked
    size = sizes(point.budget_bytes for point in points)
    return table(
        "Overhead over budget",
        points,
        ("budget", lambda point: point.budget_bytes, size),
        ("peak", lambda point: point.predicted_peak_bytes, size),
        ("host", lambda point: point.host_bytes, size if curve.host_budget_bytes is not None else None),
        ("overhead", lambda point: point.overhead, signed_percent),
        ("bound", lambda point: point.lower_bound_overhead, at_least_percent),
        ("found by", lambda point: point.solver or None, str),
        ("status", lambda point: point.status, str),
        ("", partial(marks, curve), str),
        bold=partial(marks, curve),
    )


def _asked(curve: TradeOffCurve, asked: TradeOffPoint) -> str:
    """Say what the user's budget costs and what one more GiB buys."""
    budget = format_bytes(asked.budget_bytes)
    if asked.overhead is None:
        smallest = format_bytes(curve.minimum_feasible_peak_bytes)
        return f"Your budget of {budget} does not fit: the smallest known to fit is {smallest}."
    said = f"Your budget of {budget} costs {signed_percent(asked.overhead)} step time"
    if asked.overhead > 0 and asked.lower_bound_overhead is not None:
        said += f" (no plan below {at_least_percent(asked.lower_bound_overhead)})"
    more = curve.asked_more
    if more is None or more.overhead is None:
        return f"{said}."
    if asked.overhead <= 0:
        return f"{said}: more memory saves nothing."
    return f"{said}. With 1 GiB more it costs {signed_percent(more.overhead)}."


def _sizes(name: str, axis: SizeAxis) -> RenderableType:
    found = (("largest", axis.largest), ("fastest", axis.best))

    def marks(row: SizeRow) -> str:
        return ", ".join(mark for mark, at in found if at is row)

    return table(
        f"Other {name} at {format_bytes(axis.budget_bytes)}",
        axis.rows,
        ("size", lambda row: row.size, str),
        ("peak", lambda row: _needed(row.outcome), str),
        *_OF_OUTCOMES,
        (f"{axis.unit}/s", lambda row: row.per_second, _rate),
        ("", marks, str),
        bold=marks,
    )


def _needed(outcome: Outcome) -> str:
    size = format_bytes(outcome.predicted_peak_bytes or outcome.minimum_feasible_peak_bytes)
    return size if outcome.fits else f"needs {size}"


def _largest(axis: SizeAxis) -> str:
    budget = format_bytes(axis.budget_bytes)
    largest, best = axis.largest, axis.best
    if largest is None or best is None or best.per_second is None:
        return f"No {axis.name} fits {budget}, not even {axis.rows[0].size}."
    return (
        f"The largest that fits {budget} is a {axis.name} of {largest.size}; "
        f"{best.size} trains most: {_rate(best.per_second)} {axis.unit} a second."
    )


def _devices(rows: tuple[DeviceRow, ...]) -> RenderableType:
    return table(
        "Devices",
        rows,
        ("device", lambda row: row.device, str),
        ("memory", lambda row: row.memory_bytes, format_bytes),
        ("fits", lambda row: row.outcome.fits, yes_or_no),
        ("without recompute", lambda row: row.baseline_peak_bytes, format_bytes),
        *_OF_OUTCOMES,
    )


def _methods(methods: tuple[Method, ...]) -> RenderableType:
    rows = [(method.name, point) for method in methods for point in method.points]
    size = sizes(point.budget_bytes for _, point in rows)
    return table(
        "Solvers and other ways",
        rows,
        ("method", lambda row: row[0], str),
        ("budget", lambda row: row[1].budget_bytes, size),
        ("peak", lambda row: row[1].predicted_peak_bytes, size),
        ("overhead", lambda row: row[1].overhead, signed_percent),
        ("bound", lambda row: row[1].lower_bound_overhead, at_least_percent),
    )


def _origin(curve: TradeOffCurve) -> str:
    said = (
        f"The step without recompute takes {format_seconds(curve.baseline_step_seconds)} by the {curve.cost_model} "
        f"cost model of {curve.device}; torch {curve.torch}."
    )
    if curve.eager is not None:
        took = f"{format_seconds(curve.eager.step_seconds)} and {format_bytes(curve.eager.peak_bytes)}"
        said += f" Eager takes {took}; percentages are of that peak."
    if curve.host_budget_bytes is not None:
        said += f" Up to {format_bytes(curve.host_budget_bytes)} may wait in the host's memory."
    return said


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


@dataclass(frozen=True, slots=True)
class Line:
    """A curve, or single points: budgets in GiB, overheads in percent.

    The marker is what a terminal draws it with: one character, or plotext's code for dots of a quarter of one.
    """

    name: str
    gibibytes: list[float]
    percents: list[float]
    marker: str
    is_curve: bool = True


def lines(curve: TradeOffCurve, methods: Sequence[Method] = ()) -> Iterator[Line]:
    """Return what is drawn, topmost last: bound, overhead, other methods, the knee, the user's budget."""
    yield _line("lower bound", [(point, point.lower_bound_overhead) for point in curve.points], _BOUND)
    yield _line("overhead", [(point, point.overhead) for point in curve.points], _CURVE)
    for place, method in enumerate(methods):
        if method.points and method.points != curve.points:
            is_curve = not is_strategy(method.name)
            marker = _METHODS[place % len(_METHODS)]
            yield _line(method.name, [(point, point.overhead) for point in method.points], marker, is_curve=is_curve)
    for name, point, marker in (("knee", curve.knee, "K"), ("your budget", curve.asked, "B")):
        if point is not None and point.overhead is not None:
            yield _line(name, [(point, point.overhead)], marker, is_curve=False)


def _line(
    name: str, points: Sequence[tuple[TradeOffPoint, float | None]], marker: str, *, is_curve: bool = True
) -> Line:
    known = [(point.budget_bytes / 2**30, 100 * ratio) for point, ratio in points if ratio is not None]
    return Line(name, [x for x, _ in known], [y for _, y in known], marker, is_curve)


def draw(curve: TradeOffCurve, methods: tuple[Method, ...], *, width: int) -> Text:
    """Return the curve as text, or say why there is none."""
    shown = [line for line in lines(curve, methods) if line.gibibytes]
    if not shown:
        return Text("There is nothing to draw: no budget has a plan.")
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(min(width, _WIDTH_AT_MOST), max(_HEIGHT, _BESIDE_LEGEND + _ROWS_OF_LEGEND * len(shown)))
    for line in shown:
        signal = figure.signal(line.gibibytes, line.percents, marker=line.marker)
        signal.lines(line.is_curve)
        signal.label(line.name)
        figure.draw(signal)
    figure.label("budget, GiB")
    figure.label("overhead, %", "y")
    right = max(max(line.gibibytes) for line in shown)
    top = max(max(line.percents) for line in shown)
    figure.legend(True, x=right, y=top, ha="right", va="top", relative=True)
    drawn = figure.build().string(colorless=True)
    return Text("\n".join(row.rstrip() for row in drawn.splitlines()), no_wrap=True)
