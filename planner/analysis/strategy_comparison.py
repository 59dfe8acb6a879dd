"""What established systems do with a step, each beside the best plan that is known at the same peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from planner import solvers, strategies
from planner.analysis.study import Study
from planner.analysis.trade_off.curve import CurveSweep
from planner.common.limits import SolveLimits
from planner.errors import InfeasibleBudgetError, UsageError
from planner.ir.problem import Problem, Progress
from planner.plans.allocator import optimizer_peak_bytes
from planner.plans.evaluated import Evaluated, cheapest_within, evaluate
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
        """Return it as JSON has it."""
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


class _Best(NamedTuple):
    """The best plan that is known beside a strategy, and what is proven of all such plans."""

    added_seconds: float
    lower_bound_seconds: float
    solver: str


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
    found: dict[str, Evaluated] = {}
    named: dict[str, strategies.Strategy] = {}
    absent: dict[str, str] = {}
    problem = replace(study.problem(), host=step.host)
    for strategy in chosen:
        name = strategy.name_for(step)
        try:
            found[name] = _evaluated(study, problem, step, strategy)
            named[name] = strategy.strategy
        except UsageError as error:
            absent[name] = str(error)
    of_one_device = [one for one in found.values() if named[one.name].step is None]
    offloading = [one for one in of_one_device if one.host_bytes]
    others = [one for one in of_one_device if not one.host_bytes]
    share_seconds = time_limit_seconds / max(len(of_one_device), 1)
    each = SolveLimits(time_limit_seconds=share_seconds, deterministic=deterministic, seed=seed)
    best = dict(_best_beside(study, others, solver, each, progress))
    for one in offloading:
        best[one.name] = _best_offloading_beside(study, one, others, solver, each, progress)
    baseline = problem.baseline
    rows = [_row(one, named[one.name], best.get(one.name), baseline.seconds or 1.0) for one in found.values()]
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


def _evaluated(study: Study, problem: Problem, step: strategies.StrategyStep, chosen: strategies.Chosen) -> Evaluated:
    own = chosen.step_of(step)
    return evaluate(
        problem if own is step else replace(problem, graph=own.graph, costs=tuple(own.costs)),
        chosen.schedule(own),
        chosen.name_for(step),
        optimizer_peak_bytes=optimizer_peak_bytes(study.graph, study.static_memory),
    )


def _row(found: Evaluated, strategy: strategies.Strategy, best: _Best | None, seconds: float) -> Incumbent:
    """Set a strategy beside the best plan that is known, which may be itself."""
    best_seconds = None if best is None else min(best.added_seconds, found.added_seconds)
    bound_seconds = None if best is None or best_seconds is None else min(best.lower_bound_seconds, best_seconds)
    return Incumbent(
        name=found.name,
        summary=strategy.summary,
        peak_bytes=found.peak_bytes,
        overhead=found.added_seconds / seconds,
        best_overhead=None if best_seconds is None else best_seconds / seconds,
        lower_bound_overhead=None if bound_seconds is None else bound_seconds / seconds,
        solver=best.solver if best is not None and best.added_seconds < found.added_seconds else found.name,
        host_bytes=found.host_bytes,
        note=strategy.note,
    )


def _best_beside(
    study: Study, found: list[Evaluated], solver: str, each: SolveLimits, progress: Progress | None
) -> Iterator[tuple[str, _Best]]:
    if not found:
        return
    effort = replace(each, time_limit_seconds=each.time_limit_seconds * len(found))
    budgets = ",".join(str(peak) for peak in sorted({one.peak_bytes for one in found}))
    tracing = CurveSweep(study, budgets=budgets, solver=solver, effort=effort)
    tracing.run(progress=progress)
    for one in found:
        known = (cheapest_within(one.peak_bytes, found), cheapest_within(one.peak_bytes, tracing.found))
        best = min(filter(None, known), key=lambda plan: plan.added_seconds)
        yield one.name, _Best(best.added_seconds, tracing.bound_seconds(one.peak_bytes), best.name)


def _best_offloading_beside(
    study: Study, one: Evaluated, others: list[Evaluated], solver: str, effort: SolveLimits, progress: Progress | None
) -> _Best:
    """Look for a plan that may offload as much as a strategy does."""
    host = study.host(one.host_bytes, at_least=1)
    problem = replace(study.problem(one.peak_bytes), host=host)
    incumbent = BestKnown(problem)
    for known in (one, *(other for other in others if other.peak_bytes <= one.peak_bytes)):
        incumbent.update(known.schedule, known.name)
    try:
        able = solver if solvers.get(solver).offloads else AutoSolver.name
        study.improve(incumbent, solver=able, effort=effort, progress=progress)
    except InfeasibleBudgetError as error:
        incumbent.raise_bound(error.lower_bound_seconds)
    return _Best(incumbent.added_seconds, incumbent.lower_bound_seconds, incumbent.solver)
