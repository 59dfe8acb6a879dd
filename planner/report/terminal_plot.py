"""The curve drawn with characters."""

from __future__ import annotations

from importlib.util import find_spec

from rich.text import Text

from planner.analysis.trade_off.methods import Method
from planner.analysis.trade_off.types import TradeOffCurve
from planner.report.curve_lines import lines

_WIDTH_AT_MOST, _HEIGHT = 100, 18

_BESIDE_LEGEND, _ROWS_OF_LEGEND = 6, 2
"""Rows that the legend cannot have, and what each of its entries takes: without room it is left out."""


def draw(curve: TradeOffCurve, methods: tuple[Method, ...], *, width: int) -> Text:
    """Return the curve as text, or say why there is none."""
    shown = [line for line in lines(curve, methods) if line.gibibytes]
    if not shown:
        return Text("There is nothing to draw: no budget has a plan.")
    if find_spec("plotext") is None:
        return Text("A plot is drawn here with plotext: pip install checkpoint-planner[plot]", style="dim")
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
