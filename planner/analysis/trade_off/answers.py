"""Other solvers, and what people do without one, on the axes of the curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner import solvers, strategies
from planner.analysis.study import WORTH_OFFLOADING, Study
from planner.analysis.trade_off.axes import DeviceRow
from planner.analysis.trade_off.curve import RECOMPUTE_ALONE, Count, CurveSweep
from planner.analysis.trade_off.types import TradeOffCurve, TradeOffPoint
from planner.common.json_reader import to_data
from planner.common.registry import did_you_mean
from planner.errors import UsageError
from planner.ir.schedule import Schedule
from planner.plans.comparison import evaluate
from planner.plans.plan import Plan
from planner.solvers.auto import AutoSolver


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to choose what is recomputed: its points, or the reason why there are none.

    A solver's points are at the curve's budgets; of a method without a budget each stands at its own peak.
    """

    name: str
    points: tuple[TradeOffPoint, ...]
    reason: str = ""


def check(names: Sequence[str], runtime: str = "graph") -> None:
    """Refuse unknown methods, and those that a runtime cannot carry out."""
    known = (*solvers.names(), *strategies.ALIASES, *strategies.known(), RECOMPUTE_ALONE)
    for name in names:
        if name not in known and not is_strategy(name):
            hint = did_you_mean(name, known, write=str)
            raise UsageError(f"there is no solver or way {name!r}; {hint}there are {', '.join(known)}")
    if runtime == "modules":
        solvers.check_for_regions(*(name for name in names if not is_strategy(name) and name != RECOMPUTE_ALONE))


def is_strategy(name: str) -> bool:
    """Whether a method is that of an established system: one point, whatever the budget."""
    return name not in solvers.names() and strategies.find(name) is not None


def methods_beside(
    curve: CurveSweep, names: Sequence[str], count: Count = lambda done, total: None
) -> tuple[Method, ...]:
    """Evaluate methods at the budgets of a curve, each solver with the curve's time limit."""
    check(names, curve.study.origin.runtime)
    return tuple(_method(curve, name, count) for name in dict.fromkeys(names))


def _method(curve: CurveSweep, name: str, count: Count) -> Method:
    """Return a strategy's point, or a solver's points; these with offload if the curve is, and the solver can."""
    if is_strategy(name):
        try:
            return Method(name=name, points=(point_of(curve.study, curve.study.strategy(name), name),))
        except UsageError as error:
            return Method(name=name, points=(), reason=str(error))
    if name == curve.search.solver:
        return Method(name=name, points=curve.curve().points)
    if name == RECOMPUTE_ALONE and curve.alone is not None:
        return Method(name=name, points=curve.alone.curve().points)
    solver = AutoSolver.name if name == RECOMPUTE_ALONE else name
    host = curve.host if solvers.get(solver).offloads else None
    search = replace(curve.search.under(name), solver=solver)
    sweep = CurveSweep(curve.study, search, known=curve, host=host)
    sweep.run(count)
    return Method(name=name, points=sweep.curve().points)


def point_of(study: Study, schedule: Schedule, name: str) -> TradeOffPoint:
    """Return the point of a schedule: its own peak is its budget."""
    found = evaluate(replace(study.problem(), host=study.unlimited_host()), schedule, name)
    return TradeOffPoint(
        budget_bytes=found.peak_bytes,
        predicted_peak_bytes=found.peak_bytes,
        overhead=found.overhead,
        host_bytes=found.host_bytes,
        solver=name,
        status="feasible",
    )


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The curve and the other axes that were asked about."""

    curve: TradeOffCurve
    devices: tuple[DeviceRow, ...] = ()
    methods: tuple[Method, ...] = ()
    plans: tuple[Plan, ...] = ()
    """The plan of each point, for who wants to look into it; no part of the report."""

    @property
    def offload_helps_to_bytes(self) -> int | None:
        """The largest budget at which offload saves more than half a point of the step; None if it never does."""
        alone = next((method.points for method in self.methods if method.name == RECOMPUTE_ALONE), ())
        costs = (
            (float("inf") if one.overhead is None else one.overhead for one in points)
            for points in (alone, self.curve.points)
        )
        helped = (most - least > WORTH_OFFLOADING for most, least in zip(*costs, strict=False))
        return max((p.budget_bytes for p, helps in zip(self.curve.points, helped, strict=False) if helps), default=None)

    def report(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        return {
            **self.curve.report(),
            "batch_sizes": self.curve.batch_sizes.report() if self.curve.batch_sizes else None,
            "seq_lens": self.curve.seq_lens.report() if self.curve.seq_lens else None,
            "devices": [row.report() for row in self.devices],
            "solvers": to_data(self.methods),
        }
