"""What one step costs at one budget, and so which devices it fits, and what recompute costs there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.analysis.study import Study
from planner.common.json_reader import attributes
from planner.common.options import Budget, Offload, Search
from planner.plans.device_file import find
from planner.plans.plan import NoPlanFitsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A plan in numbers, or that there is none: its status is then ``"infeasible"``.

    In both cases the smallest budget for which a plan is known is there; ``step_seconds`` is of the planned step.
    """

    status: str
    minimum_feasible_peak_bytes: int
    predicted_peak_bytes: int | None = None
    overhead: float | None = None
    lower_bound_overhead: float | None = None
    step_seconds: float | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.predicted_peak_bytes is not None


def ask(study: Study, budget_bytes: int, search: Search, offload: Offload) -> Outcome:
    """Plan a step for a budget, and give what comes of it in numbers."""
    try:
        plan = study.planned(Budget(budget=budget_bytes), search, offload)
    except NoPlanFitsError as error:
        return Outcome(status="infeasible", minimum_feasible_peak_bytes=error.minimum_feasible_peak_bytes)
    return Outcome(
        status=plan.status,
        minimum_feasible_peak_bytes=plan.minimum_feasible_peak_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        overhead=plan.overhead,
        lower_bound_overhead=plan.lower_bound_overhead,
        step_seconds=plan.baseline_step_seconds + plan.added_seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One device: its memory is the budget, the baseline what the step needs there without recompute."""

    device: str
    memory_bytes: int
    baseline_peak_bytes: int
    outcome: Outcome

    def report(self) -> dict[str, Any]:
        """Return the row as plain data for JSON."""
        return {**attributes(self, "device", "memory_bytes", "baseline_peak_bytes"), **asdict(self.outcome)}


class DeviceSearch:
    """Rows in the making, of devices by name or file, on each of which ``study_on`` captures the step."""

    def __init__(
        self, names: Sequence[str], study_on: Callable[[str], Study], search: Search, offload: Offload
    ) -> None:
        self.devices = {name: find(name) for name in names}
        self.study_on = study_on
        self.search, self.offload = search, offload
        self.rows: tuple[DeviceRow, ...] = ()

    def run(self) -> None:
        """Capture and plan for each device."""
        for name, spec in self.devices.items():
            search = self.search.under(name)
            search.tell("capturing forward and backward")
            study = self.study_on(name)
            row = DeviceRow(
                device=spec.name,
                memory_bytes=spec.memory_bytes,
                baseline_peak_bytes=study.problem().budget_bytes + study.graph.total_static_bytes,
                outcome=ask(study, spec.memory_bytes, search, self.offload),
            )
            self.rows = (*self.rows, row)
