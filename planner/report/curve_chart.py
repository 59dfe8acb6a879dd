"""Draw the curve of overhead over budget with characters on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from planner.analysis.trade_off.answers import Method, is_strategy
from planner.analysis.trade_off.types import TradeOffCurve, TradeOffPoint

_CURVE, _BOUND = "hd", "."
_METHODS = "+x*#%&$@"
_WIDTH_AT_MOST, _HEIGHT = 100, 18

_BESIDE_LEGEND, _ROWS_OF_LEGEND = 6, 2
"""Rows that the legend cannot have, and what each of its entries takes: without room it is left out."""


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
