"""What established systems do with a step, each beside the best plan that is known at the same peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner import strategies
from planner.effort import Effort
from planner.errors import UsageError
from planner.plan_parts import SCHEMA
from planner.problem import Progress
from planner.reservation import optimizer_peak_bytes
from planner.simulate import simulate
from planner.study_types import Study
from planner.trade_off.curve import Tracing

NEAR = 0.03
"""Within so much of the step a way counts as near the best plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One strategy on a step.

    Parameters
    ----------
    name : str
        With the number that it was taken with.
    summary : str
    peak_bytes : int
        On the whole device, the optimizer's own step included.
    overhead : float
        Recompute time over the step without recompute.
    best_overhead : float
        Of the best plan that is known for this peak, which may be the strategy's own.
    lower_bound_overhead : float
        Proven: no plan for this peak has a smaller one.
    solver : str
        Who found the best plan; the strategy's name if nothing better is known.
    """

    name: str
    summary: str
    peak_bytes: int
    overhead: float
    best_overhead: float
    lower_bound_overhead: float
    solver: str

    @property
    def excess(self) -> float:
        """What it pays more than the best plan."""
        return self.overhead - self.best_overhead

    @property
    def gap(self) -> float:
        """What it pays more than the lower bound."""
        return self.overhead - self.lower_bound_overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Established:
    """What established systems do with a step.

    Parameters
    ----------
    model, device, cost_model, torch : str
        What the step is of.
    baseline_peak_bytes, baseline_step_seconds : int, float
        The step without recompute.
    rows : tuple of Standing
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
    rows: tuple[Standing, ...]
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
    summary: str
    peak_bytes: int
    recompute_seconds: float


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
        Roughly, for the plans at all peaks together: each is solved from what is known at the others.

    Raises
    ------
    UsageError
        If there is no strategy of some name.
    """
    chosen = [strategies.get(name) for name in names or strategies.known()]
    step = strategies.Step(study.graph, study.costs)
    found: dict[str, _Simulated] = {}
    absent: dict[str, str] = {}
    for one in chosen:
        try:
            simulated = _simulated(study, step, one)
            found[simulated.name] = simulated
        except UsageError as error:
            absent[one.name_for(step)] = str(error)
    effort = Effort(time_limit_seconds=time_limit_seconds, deterministic=deterministic, seed=seed)
    baseline = study.problem().baseline
    return Established(
        model=study.graph.name,
        device=study.origin.device,
        cost_model=study.origin.cost_model,
        torch=study.origin.torch_version,
        baseline_peak_bytes=baseline.peak_bytes + study.graph.total_static_bytes,
        baseline_step_seconds=baseline.seconds,
        rows=_beside_the_best(study, list(found.values()), solver, effort, progress),
        absent=absent,
    )


def _simulated(study: Study, step: strategies.Step, chosen: strategies.Chosen) -> _Simulated:
    evaluation = simulate(study.graph, study.costs, chosen.schedule(step))
    return _Simulated(
        chosen.name_for(step),
        chosen.strategy.summary,
        max(
            evaluation.peak_bytes + study.graph.total_static_bytes,
            optimizer_peak_bytes(study.graph, study.surroundings),
        ),
        evaluation.recompute_seconds,
    )


def _beside_the_best(
    study: Study, found: list[_Simulated], solver: str, effort: Effort, progress: Progress | None
) -> tuple[Standing, ...]:
    if not found:
        return ()
    budgets = ",".join(str(peak) for peak in sorted({one.peak_bytes for one in found}))
    tracing = Tracing(study, budgets=budgets, solver=solver, effort=effort)
    tracing.run(progress=progress)
    points = {point.budget_bytes: point for point in tracing.curve().points}
    seconds = tracing.baseline.seconds or 1.0
    rows = []
    for one in found:
        # Any of the ways is a plan too, for its own peak and every larger one.
        fitting = [other for other in found if other.peak_bytes <= one.peak_bytes]
        cheapest = min(fitting, key=lambda other: (other.recompute_seconds, other is not one))
        best_overhead, by = cheapest.recompute_seconds / seconds, cheapest.name
        point = points[one.peak_bytes]
        if point.overhead is not None and point.overhead < best_overhead:
            best_overhead, by = point.overhead, point.solver
        rows.append(
            Standing(
                name=one.name,
                summary=one.summary,
                peak_bytes=one.peak_bytes,
                overhead=one.recompute_seconds / seconds,
                best_overhead=best_overhead,
                lower_bound_overhead=min(tracing.bound_seconds(one.peak_bytes) / seconds, best_overhead),
                solver=by,
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.peak_bytes, row.overhead, row.name)))
