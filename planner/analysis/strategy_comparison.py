"""Compare strategies of established systems with the best known plans at the same peaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from planner import solvers, strategies
from planner.analysis.study import Study
from planner.analysis.trade_off.curve import CurveSweep
from planner.common.options import Search
from planner.errors import InfeasibleBudgetError, UsageError
from planner.plans.allocator import optimizer_peak_bytes
from planner.plans.comparison import Evaluated, cheapest_within, evaluate
from planner.plans.plan import ComparisonRow, header
from planner.solvers.auto import AutoSolver
from planner.solving.incumbent import Incumbent

NEAR = 0.03
"""Within so much of the step a way counts as near the best plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Established:
    """Strategies of established systems for a step, by rising peak, and why others do not apply."""

    model: str
    device: str
    cost_model: str
    torch: str
    baseline_peak_bytes: int
    baseline_step_seconds: float
    rows: tuple[ComparisonRow, ...]
    absent: dict[str, str]

    def report(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            **header(self),
            "strategies": [{**asdict(row), "gap": row.gap} for row in self.rows],
            "absent": [{"name": name, "reason": reason} for name, reason in self.absent.items()],
        }


class _Best(NamedTuple):
    added_seconds: float
    lower_bound_seconds: float
    solver: str


def compare(study: Study, search: Search, names: Sequence[str] = ()) -> Established:
    """Compare strategies, by default all, with the best plans at their own peaks.

    The limit is for the plans at all peaks together. Those without offload are each solved from what is known at the
    others; for each strategy that offloads, a plan is looked for that may use as much of the host's memory. Raises
    UsageError if there is no strategy of some name, or the step is an eager one.
    """
    if study.origin.runtime == "modules":
        raise UsageError(
            "strategies are set beside each other on a whole graph: study the step for the runtime 'graph'"
        )
    chosen = [strategies.get(name) for name in names or strategies.known()]
    step = strategies.StrategyStep(study.graph, study.costs, study.unlimited_host())
    found: dict[str, Evaluated] = {}
    absent: dict[str, str] = {}
    problem = replace(study.problem(), host=step.host)
    optimizer_bytes = optimizer_peak_bytes(study.graph, study.static_memory)
    for strategy in chosen:
        name = strategy.name_for(step)
        try:
            found[name] = evaluate(problem, strategy.schedule(step), name, optimizer_peak_bytes=optimizer_bytes)
        except UsageError as error:
            absent[name] = str(error)
    offloading = [one for one in found.values() if one.host_bytes]
    others = [one for one in found.values() if not one.host_bytes]
    each = replace(search, time_limit_seconds=search.time_limit_seconds / max(len(found), 1))
    best = dict(_best_beside(study, others, each))
    for one in offloading:
        best[one.name] = _best_offloading_beside(study, one, others, each)
    baseline = problem.baseline
    rows = [_row(one, best[one.name], baseline.seconds or 1.0) for one in found.values()]
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


def _row(found: Evaluated, best: _Best, seconds: float) -> ComparisonRow:
    """Compare a strategy with the best known plan, which may be itself."""
    best_seconds = min(best.added_seconds, found.added_seconds)
    return ComparisonRow(
        name=found.name,
        peak_bytes=found.peak_bytes,
        overhead=found.added_seconds / seconds,
        best_overhead=best_seconds / seconds,
        lower_bound_overhead=min(best.lower_bound_seconds, best_seconds) / seconds,
        solver=best.solver if best.added_seconds < found.added_seconds else found.name,
        host_bytes=found.host_bytes,
    )


def _best_beside(study: Study, found: list[Evaluated], each: Search) -> Iterator[tuple[str, _Best]]:
    if not found:
        return
    search = replace(each, time_limit_seconds=each.time_limit_seconds * len(found))
    budgets = ",".join(str(peak) for peak in sorted({one.peak_bytes for one in found}))
    sweep = CurveSweep(study, search, budgets=budgets)
    sweep.run()
    for one in found:
        known = (cheapest_within(one.peak_bytes, found), cheapest_within(one.peak_bytes, sweep.found))
        best = min(filter(None, known), key=lambda plan: plan.added_seconds)
        yield one.name, _Best(best.added_seconds, sweep.bound_seconds(one.peak_bytes), best.name)


def _best_offloading_beside(study: Study, one: Evaluated, others: list[Evaluated], search: Search) -> _Best:
    """Search for a plan that may offload as much as a strategy does."""
    host = study.host(one.host_bytes, at_least=1)
    problem = replace(study.problem(one.peak_bytes), host=host)
    incumbent = Incumbent(problem)
    for known in (one, *(other for other in others if other.peak_bytes <= one.peak_bytes)):
        incumbent.update(known.schedule, known.name)
    try:
        able = search.solver if solvers.get(search.solver).offloads else AutoSolver.name
        study.improve(incumbent, solver=able, effort=search, progress=search.progress)
    except InfeasibleBudgetError as error:
        incumbent.raise_bound(error.lower_bound_seconds)
    return _Best(incumbent.added_seconds, incumbent.lower_bound_seconds, incumbent.solver)
