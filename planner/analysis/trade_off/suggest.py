"""Budgets to choose from, for who has named none: what the device holds, the knee of the curve, the smallest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.analysis.study import Study
from planner.analysis.trade_off.curve import CurveSweep
from planner.analysis.trade_off.types import TradeOffCurve, TradeOffPoint
from planner.common.json_reader import attributes, to_data
from planner.common.options import Search

_POINTS = 8

_ROUND = 2**30 // 64
"""A device's memory is rounded down to this, so that its text does not name more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A budget, what speaks for it, and the step time there over the model's own step, less one."""

    name: str
    budget_bytes: int
    step_time: float | None

    @property
    def text(self) -> str:
        """The budget as people type it: rounded up, so that the plan still fits.

        >>> Suggestion(name="", budget_bytes=5 * 2**30 + 1, step_time=None).text
        '5.001GiB'
        """
        unit, factor = ("GiB", 2**30) if self.budget_bytes >= 2**30 else ("MiB", 2**20)
        return f"{math.ceil(1000 * self.budget_bytes / factor) / 1000:.3f}".rstrip("0").rstrip(".") + unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions:
    """Budgets from the largest to the smallest, beside what the model takes as it is."""

    model: str
    device: str
    own_peak_bytes: int
    memory_bytes: int
    """What the device holds."""
    smallest_bytes: int
    """The smallest budget for which a plan is known."""
    budgets: tuple[Suggestion, ...]

    def report(self) -> dict[str, Any]:
        """Return them as plain data for JSON."""
        return {
            **attributes(self, "model", "device", "own_peak_bytes", "memory_bytes"),
            "suggested_budgets": to_data(self.budgets),
        }


def suggest(study: Study, search: Search) -> Suggestions:
    """Solve a few budgets of a step, and return those that are worth a look."""
    memory_bytes = study.device.memory_bytes if study.device else 0
    sweep = CurveSweep(study, search, points=_POINTS, asked=memory_bytes or None)
    sweep.run()
    curve = sweep.curve()
    own_peak_bytes = curve.eager.peak_bytes if curve.eager else curve.baseline_peak_bytes
    return Suggestions(
        model=curve.model,
        device=curve.device,
        own_peak_bytes=own_peak_bytes,
        memory_bytes=memory_bytes,
        smallest_bytes=curve.minimum_feasible_peak_bytes,
        budgets=tuple(_worth_a_look(curve)),
    )


def _worth_a_look(curve: TradeOffCurve) -> Iterator[Suggestion]:
    asked, knee = curve.asked, curve.knee
    if asked is not None and asked.overhead is not None:
        fits = f"fits {curve.device}"
        name = f"no recompute, {fits}" if asked.overhead <= 0 else fits
        needed = min(asked.budget_bytes // _ROUND * _ROUND, curve.baseline_peak_bytes)
        yield Suggestion(name=name, budget_bytes=needed, step_time=_step_time(curve, asked))
    if knee is not None:
        yield Suggestion(name="the knee", budget_bytes=knee.budget_bytes, step_time=_step_time(curve, knee))
    lowest = next((point for point in curve.points if point.overhead is not None), None)
    if lowest is not None:
        yield Suggestion(name="the smallest", budget_bytes=lowest.budget_bytes, step_time=_step_time(curve, lowest))


def _step_time(curve: TradeOffCurve, point: TradeOffPoint) -> float | None:
    if point.overhead is None:
        return None
    own_seconds = curve.eager.step_seconds if curve.eager else curve.baseline_step_seconds
    return (1 + point.overhead) * curve.baseline_step_seconds / own_seconds - 1 if own_seconds else None
