"""The curve as a picture file."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path

from planner.analysis.trade_off.methods import Method
from planner.analysis.trade_off.types import TradeOffCurve
from planner.common.atomic import check_writable, write_bytes
from planner.errors import UsageError
from planner.report.curve_lines import lines

_KINDS = (".png", ".svg")


def check(path: str) -> None:
    """Refuse a picture that could not be drawn in the end.

    Raises
    ------
    UsageError
        If its kind is not known, its place cannot be written, or matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in _KINDS:
        raise UsageError(f"cannot draw {path}: name a file that ends in {' or '.join(_KINDS)}")
    check_writable(path)
    if find_spec("matplotlib") is None:
        raise UsageError("pictures are drawn with matplotlib: pip install checkpoint-planner[plot]")


def write(path: str, curve: TradeOffCurve, methods: tuple[Method, ...] = ()) -> None:
    """Draw the curve into a file; its ending says of what kind."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for line in lines(curve, methods):
        if line.is_curve:
            axes.plot(line.gibibytes, line.percents, "-o", markersize=3, label=line.name)
        else:
            axes.scatter(line.gibibytes, line.percents, s=60, zorder=3, label=line.name)
    if curve.asked is not None:
        axes.axvline(curve.asked.budget_bytes / 2**30, color="grey", linestyle=":", linewidth=1)
    axes.set_xlabel("memory budget of the device, GiB")
    axes.set_ylabel("step time on top of no recompute, %")
    axes.set_title(f"{curve.model} on {curve.device}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    content = io.BytesIO()
    with rc_context({"svg.hashsalt": curve.model}):
        figure.savefig(content, format=Path(path).suffix[1:].lower(), dpi=150)
    write_bytes(path, content.getvalue())
