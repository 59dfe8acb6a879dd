"""What is drawn of a curve, whatever draws it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.analysis.trade_off.methods import Method, is_strategy
from planner.analysis.trade_off.types import TradeOffCurve, TradeOffPoint

_CURVE, _BOUND = "hd", "."

_METHODS = "+x*#%&$@"


@dataclass(frozen=True, slots=True)
class Line:
    """A curve, or single points.

    Parameters
    ----------
    gibibytes, percents : list of float
        Budgets and overheads.
    marker : str
        What a terminal draws it with: one character, or plotext's code for dots of a quarter of one.
    is_curve : bool
        Whether the points are to be joined.
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
