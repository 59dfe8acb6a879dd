"""What established systems do with a step, each beside the best plan that is known at the same peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from planner import solvers, strategies
from planner.analysis.study import Study
from planner.analysis.trade_off.curve import CurveSweep
from planner.common.limits import SolveLimits
from planner.errors import InfeasibleBudgetError, UsageError
from planner.ir.problem import Progress
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.plans.allocator import optimizer_peak_bytes
from planner.plans.plan_file import SCHEMA
from planner.solvers.auto import AutoSolver
from planner.solving.incumbent import Incumbent as BestKnown

NEAR = 0.03
"""Within so much of the step a way counts as near the best plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incumbent:
    """One strategy on a step.

    Parameters
    ----------
    name : str
        With the number that it was taken with.
    summary : str
    peak_bytes : int
        On the whole device, the optimizer's own step included.
    overhead : float
        Recompute time, and time of waiting for transfers, over the step without them.
    best_overhead, lower_bound_overhead : float, optional
        Of the best plan that is known for this peak with as much of the host's memory, which may be the strategy's
        own; and proven, no such plan has a smaller one. None where values are divided over devices: plans are of one.
    solver : str
        Who found the best plan; the strategy's name if nothing better is known.
    host_bytes : int
        What it offloads to the host's memory.
    note : str
        What its figures leave out.
    """

    name: str
    summary: str
    peak_bytes: int
    overhead: float
    best_overhead: float | None
    lower_bound_overhead: float | None
    solver: str
    host_bytes: int = 0
    note: str = ""

    @property
    def excess(self) -> float | None:
        """What it pays more than the best plan."""
        return None if self.best_overhead is None else self.overhead - self.best_overhead

    @property
    def gap(self) -> float | None:
        """What it pays more than the lower bound."""
        return None if self.lower_bound_overhead is None else self.overhead - self.lower_bound_overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Established:
    """What established systems do with a step.

    Parameters
    ----------
    model, device, cost_model, torch : str
        What the step is of.
    baseline_peak_bytes, baseline_step_seconds : int, float
        The step without recompute.
    rows : tuple of Incumbent
        From the smallest peak to the largest.
    absent : dict of str to str
        Why a strategy does not apply, by its name.
    """

    model: str
    device: str
    cost_model: str
    torch: str
    baseline_peak_bytes: int
    baseline_step_seconds: float
    rows: tuple[Incumbent, ...]
    absent: dict[str, str]

    def report(self) -> dict[str, Any]:
        """Give it as JSON has it."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "torch": self.torch,
            "device": self.device,
            "cost_model": self.cost_model,
            "baseline": {"peak_bytes": self.baseline_peak_bytes, "step_seconds": self.baseline_step_seconds},
            "strategies": [{**asdict(row), "gap": row.gap} for row in self.rows],
            "absent": [{"name": name, "reason": reason} for name, reason in self.absent.items()],
        }


@dataclass(frozen=True, slots=True)
class _Simulated:
    name: str
    strategy: strategies.Strategy
    schedule: Schedule
    peak_bytes: int
    added_seconds: float
    host_bytes: int

    @property
    def is_of_one_device(self) -> bool:
        return self.strategy.step is None

    def incumbent(self, seconds: float, best_seconds: float | None, bound_seconds: float | None, by: str) -> Incumbent:
        """Set it beside the best plan that is known, which may be itself."""
        best = None if best_seconds is None else min(best_seconds, self.added_seconds)
        bound = None if bound_seconds is None or best is None else min(bound_seconds, best)
        return Incumbent(
            name=self.name,
            summary=self.strategy.summary,
            peak_bytes=self.peak_bytes,
            overhead=self.added_seconds / seconds,
            best_overhead=None if best is None else best / seconds,
            lower_bound_overhead=None if bound is None else bound / seconds,
            solver=by if best is not None and best < self.added_seconds else self.name,
            host_bytes=self.host_bytes,
            note=self.strategy.note,
        )


def compare(
    study: Study,
    names: Sequence[str] = (),
    *,
    solver: str = "auto",
    time_limit_seconds: float = 20.0,
    deterministic: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Established:
    """Set strategies beside the best plans at their own peaks.

    Parameters
    ----------
    study : Study
    names : sequence of str
        Of strategies; by default all.
    solver, deterministic, seed, progress
        See :func:`planner.plan`.
    time_limit_seconds : float
        Roughly, for the plans at all peaks together. Those without offload are each solved from what is known at the
        others; for each way that offloads, a plan is looked for that may use as much of the host's memory.

    Raises
    ------
    UsageError
        If there is no strategy of some name, or the step is an eager one.
    """
    if study.origin.runtime == "modules":
        raise UsageError(
            "strategies are set beside each other on a whole graph: study the step for the runtime 'graph'"
        )
    chosen = [strategies.get(name) for name in names or strategies.known()]
    step = strategies.StrategyStep(study.graph, study.costs, study.unlimited_host())
    found: dict[str, _Simulated] = {}
    absent: dict[str, str] = {}
    for one in chosen:
        try:
            simulated = _simulated(study, step, one)
            found[simulated.name] = simulated
        except UsageError as error:
            absent[one.name_for(step)] = str(error)
    baseline = study.problem().baseline
    ways = list(found.values())
    offloading = [one for one in ways if one.is_of_one_device and one.host_bytes]
    others = [one for one in ways if one.is_of_one_device and not one.host_bytes]
    share_seconds = time_limit_seconds / max(len(offloading) + len(others), 1)
    each = SolveLimits(time_limit_seconds=share_seconds, deterministic=deterministic, seed=seed)
    seconds = baseline.seconds or 1.0
    rows = [
        *_beside_the_best(study, others, solver, each, progress),
        *(_beside_the_best_offloading(study, one, others, solver, each, progress) for one in offloading),
        *(one.incumbent(seconds, None, None, one.name) for one in ways if not one.is_of_one_device),
    ]
    return Established(
        model=study.graph.name,
        device=study.origin.device,
        cost_model=study.origin.cost_model,
        torch=study.origin.torch_version,
        baseline_peak_bytes=baseline.peak_bytes + study.graph.total_static_bytes,
        baseline_step_seconds=baseline.seconds,
        rows=tuple(sorted(rows, key=lambda row: (row.peak_bytes, row.overhead, row.name))),
        absent=absent,
    )


def _simulated(study: Study, step: strategies.StrategyStep, chosen: strategies.Chosen) -> _Simulated:
    own = chosen.step_of(step)
    schedule = chosen.schedule(own)
    evaluation = simulate(own.graph, own.costs, schedule, own.host)
    return _Simulated(
        name=chosen.name_for(step),
        strategy=chosen.strategy,
        schedule=schedule,
        peak_bytes=max(
            evaluation.peak_bytes + study.graph.total_static_bytes,
            optimizer_peak_bytes(study.graph, study.static_memory),
        ),
        added_seconds=evaluation.added_seconds,
        host_bytes=evaluation.host_bytes,
    )


def _beside_the_best(
    study: Study, found: list[_Simulated], solver: str, each: SolveLimits, progress: Progress | None
) -> Iterator[Incumbent]:
    if not found:
        return
    effort = replace(each, time_limit_seconds=each.time_limit_seconds * len(found))
    budgets = ",".join(str(peak) for peak in sorted({one.peak_bytes for one in found}))
    tracing = CurveSweep(study, budgets=budgets, solver=solver, effort=effort)
    tracing.run(progress=progress)
    points = {point.budget_bytes: point for point in tracing.curve().points}
    seconds = tracing.baseline.seconds or 1.0
    for one in found:
        cheapest = _cheapest_within(found, one)
        best_seconds, by = cheapest.added_seconds, cheapest.name
        point = points[one.peak_bytes]
        if point.overhead is not None and point.overhead * seconds < best_seconds:
            best_seconds, by = point.overhead * seconds, point.solver
        yield one.incumbent(seconds, best_seconds, tracing.bound_seconds(one.peak_bytes), by)


def _beside_the_best_offloading(
    study: Study, one: _Simulated, others: list[_Simulated], solver: str, effort: SolveLimits, progress: Progress | None
) -> Incumbent:
    """Look for a plan that may offload as much as a strategy does."""
    host = study.host(one.host_bytes, at_least=1)
    problem = replace(study.problem(one.peak_bytes), host=host)
    incumbent = BestKnown(problem)
    for way in (one, *(other for other in others if other.peak_bytes <= one.peak_bytes)):
        incumbent.update(way.schedule, way.name)
    try:
        able = solver if solvers.get(solver).offloads else AutoSolver.name
        study.improve(incumbent, solver=able, effort=effort, progress=progress)
    except InfeasibleBudgetError as error:
        incumbent.raise_bound(error.lower_bound_seconds)
    seconds = problem.baseline.seconds or 1.0
    return one.incumbent(seconds, incumbent.recompute_seconds, incumbent.lower_bound_seconds, incumbent.solver)


def _cheapest_within(found: list[_Simulated], one: _Simulated) -> _Simulated:
    """Give the cheapest of some ways at a peak: any is a plan too, for its own peak and every larger one."""
    fitting = [other for other in found if other.peak_bytes <= one.peak_bytes]
    return min(fitting, key=lambda other: (other.added_seconds, other is not one))
