"""Other solvers, and what people do without one, on the axes of the curve."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from planner import solvers, strategies
from planner.analysis.compatibility import check_methods
from planner.analysis.study import Study
from planner.analysis.trade_off.curve import Count, CurveSweep
from planner.analysis.trade_off.types import TradeOffPoint
from planner.common.limits import SolveLimits
from planner.errors import PlannerError, UsageError
from planner.ir.problem import Progress
from planner.ir.schedule import Schedule
from planner.plans.evaluated import evaluate
from planner.solvers.auto import AutoSolver

PYTORCH = "pytorch"
"""PyTorch's min-cut partitioner at several values of its ``activation_memory_budget``."""


RECOMPUTE_ALONE = "recompute"
"""Solver ``auto`` without offload, beside a curve with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to choose what is recomputed.

    Parameters
    ----------
    points : tuple of TradeOffPoint
        A solver's are at the curve's budgets; of a method without a budget each stands at its own peak.
    reason : str
        Why there is no point, if there is none.
    """

    name: str
    points: tuple[TradeOffPoint, ...]
    reason: str = ""

    def report(self) -> dict[str, Any]:
        """Return the method as plain data for JSON."""
        return {"name": self.name, "points": [asdict(point) for point in self.points], "reason": self.reason}


def check(names: Sequence[str], runtime: str = "graph") -> None:
    """Refuse names of no way, and those of ways that a runtime cannot go.

    Raises
    ------
    UsageError
    """
    known = (*solvers.names(), *strategies.ALIASES, *strategies.known(), PYTORCH, RECOMPUTE_ALONE)
    for name in names:
        if name not in known and not is_strategy(name):
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise UsageError(f"there is no solver or way {name!r}; {hint}there are {', '.join(known)}")
    check_methods(runtime, *(name for name in names if not is_strategy(name) and name != RECOMPUTE_ALONE))


def is_strategy(name: str) -> bool:
    """Whether a method is that of an established system: one point, whatever the budget."""
    return name not in solvers.names() and strategies.find(name) is not None


class MethodSweep:
    """Ways in the making; what is done can be asked for at any time.

    Parameters
    ----------
    names : sequence of str
        See :func:`check`.
    curve : CurveSweep
        Whose budgets are taken, and whose bounds hold for every method.
    effort : SolveLimits
        For each solver.
    pytorch : callable, optional
        Gives what PyTorch's partitioner decides on the graph of the same step, one schedule after the other.
    """

    def __init__(
        self,
        names: Sequence[str],
        curve: CurveSweep,
        *,
        effort: SolveLimits,
        pytorch: Callable[[], Iterable[Schedule]] | None = None,
    ) -> None:
        check(names, curve.study.origin.runtime)
        self.names = tuple(dict.fromkeys(names))
        self.curve = curve
        self.effort = effort
        self.pytorch = pytorch
        self.methods: tuple[Method, ...] = ()

    def run(self, *, progress: Progress | None = None, count: Count | None = None) -> None:
        """Find every method's points."""
        for name in self.names:

            def tell(line: str, name: str = name) -> None:
                if progress is not None:
                    progress(f"{name}: {line}")

            before = self.methods
            for method in self._growing(name, tell, count):
                self.methods = (*before, method)

    def _growing(self, name: str, tell: Progress, count: Count | None) -> Iterator[Method]:
        """Return a method, and again each time that it has another point."""
        if is_strategy(name):
            yield self._strategy(name)
        elif name == PYTORCH:
            yield from self._pytorch(tell)
        else:
            yield self._solver(name, tell, count)

    def _solver(self, name: str, tell: Progress, count: Count | None) -> Method:
        """Return a solver's points; with offload if the curve is, and the solver can."""
        curve = self.curve
        if name == curve.solver:
            return Method(name=name, points=curve.curve().points)
        alone = name == RECOMPUTE_ALONE
        host = None if alone or not solvers.get(name).offloads else curve.host
        tracing = CurveSweep(
            curve.study, solver=AutoSolver.name if alone else name, effort=self.effort, known=curve, host=host
        )
        tracing.run(progress=tell, count=count)
        return Method(name=name, points=tracing.curve().points)

    def _strategy(self, name: str) -> Method:
        study = self.curve.study
        try:
            schedule = study.strategy(name)
        except UsageError as error:
            return Method(name=name, points=(), reason=str(error))
        return Method(name=name, points=(point_of(study, schedule, name),))

    def _pytorch(self, tell: Progress) -> Iterator[Method]:
        method = Method(name=PYTORCH, points=(), reason="" if self.pytorch else "there is no model to partition")
        yield method
        tell("partitioning")
        try:
            for schedule in self.pytorch() if self.pytorch else ():
                points = {*method.points, point_of(self.curve.study, schedule, PYTORCH)}
                method = replace(method, points=tuple(sorted(points, key=lambda point: point.budget_bytes)))
                yield method
                tell(f"{len(method.points)} different points")
        except PlannerError as error:
            yield replace(method, reason=str(error))


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
