"""The curve of overhead over budget, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.analysis.trade_off.axes import SizeAxis
from planner.common.json_reader import attributes, to_data
from planner.plans.plan import EagerStep, header


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOffPoint:
    """Overhead and bound at one budget of the whole device."""

    budget_bytes: int
    predicted_peak_bytes: int | None = None
    """The plan's peak, None if there is no plan."""
    overhead: float | None = None
    """Time of recompute, and of waiting for transfers, over the step without them."""
    lower_bound_overhead: float | None = None
    """Proven: no plan within the budget has a smaller overhead."""
    solver: str = ""
    """The solver that found the plan, perhaps for a smaller budget."""
    status: str = "infeasible"
    """``"optimal"`` (the overhead equals the bound), ``"feasible"`` or ``"infeasible"``."""
    host_bytes: int = 0
    """What the plan offloads to the host's memory."""


@dataclass(frozen=True, kw_only=True)
class TradeOffCurve:
    """Overhead over budget: neither it nor its lower bound ever rises with the budget."""

    model: str
    device: str
    cost_model: str
    torch: str
    """Model, device, cost model and version of the step."""
    baseline_peak_bytes: int
    baseline_step_seconds: float
    """The step without recompute."""
    minimum_feasible_peak_bytes: int
    """Smallest budget for which a plan is known."""
    proven_minimum_peak_bytes: int
    """Proven: no plan keeps a smaller budget."""
    points: tuple[TradeOffPoint, ...]
    """From the smallest budget to the largest."""
    asked: TradeOffPoint | None = None
    """At the budget that was asked about."""
    asked_more: TradeOffPoint | None = None
    """At 1 GiB more than that."""
    is_complete: bool = True
    """Whether all points that were wanted are there."""
    host_budget_bytes: int | None = None
    """What plans may offload to the host's memory; None where they offload nothing."""
    eager: EagerStep | None = None
    """The model's own step, if it is known: percentages are of its peak, overheads are over the captured step."""
    batch_sizes: SizeAxis | None = None
    seq_lens: SizeAxis | None = None
    """Other sizes at the budget that was asked about."""

    @property
    def knee(self) -> TradeOffPoint | None:
        """Where the curve bends most; see :func:`find_knee`."""
        return find_knee(self.points)

    @property
    def with_asked(self) -> tuple[TradeOffPoint, ...]:
        """The points, and among them the one that was asked about."""
        known = {point.budget_bytes for point in self.points}
        beside = [self.asked] if self.asked is not None and self.asked.budget_bytes not in known else []
        return tuple(sorted([*self.points, *beside], key=lambda point: point.budget_bytes))

    def report(self) -> dict[str, Any]:
        """Return the curve as plain data for JSON."""
        knee = self.knee
        return {
            **header(self),
            "eager": to_data(self.eager),
            **attributes(self, "minimum_feasible_peak_bytes", "proven_minimum_peak_bytes", "points", "is_complete"),
            "knee_budget_bytes": knee.budget_bytes if knee else None,
            "asked": to_data(self.asked),
            "one_gib_more": to_data(self.asked_more),
            "host_budget_bytes": self.host_budget_bytes,
        }


def find_knee(points: Sequence[TradeOffPoint]) -> TradeOffPoint | None:
    """Return the point of a curve that lies farthest below the straight line between its ends.

    Both axes are first scaled to the range that they cover. Beyond that point a byte buys less than it does on
    average, before it more. Points without a plan do not count, and there is none where no point lies below the line.

    References
    ----------
    Satopaa, Albrecht, Irwin, Raghavan, "Finding a 'Kneedle' in a Haystack: Detecting Knee Points in System
    Behavior", ICDCS Workshops 2011.

    Examples
    --------
    >>> overheads = (0.4, 0.1, 0.05, 0.0)
    >>> find_knee([TradeOffPoint(budget_bytes=i, overhead=o) for i, o in enumerate(overheads)]).budget_bytes
    1
    """
    known = [(point, point.overhead) for point in points if point.overhead is not None]
    if len(known) < 3:
        return None
    (first, highest), (last, lowest) = known[0], known[-1]
    width, height = last.budget_bytes - first.budget_bytes, highest - lowest
    if width <= 0 or height <= 0:
        return None
    below = [1 - (p.budget_bytes - first.budget_bytes) / width - (o - lowest) / height for p, o in known]
    knee = below.index(max(below))
    return known[knee][0] if below[knee] > 1e-9 else None
