"""Which devices a step fits, and what recompute costs there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.analysis.study import Study
from planner.analysis.trade_off.outcome import Outcome, ask
from planner.common.limits import SolveLimits
from planner.ir.problem import Progress
from planner.plans.device_file import find


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One device.

    Parameters
    ----------
    memory_bytes : int
        What it has, and the budget of the plan.
    baseline_peak_bytes : int
        What the step needs there without recompute.
    """

    device: str
    memory_bytes: int
    baseline_peak_bytes: int
    outcome: Outcome

    def report(self) -> dict[str, Any]:
        """Return the row as plain data for JSON."""
        return {
            "device": self.device,
            "memory_bytes": self.memory_bytes,
            "baseline_peak_bytes": self.baseline_peak_bytes,
            **asdict(self.outcome),
        }


class DeviceSearch:
    """Rows in the making; what is done can be asked for at any time.

    Parameters
    ----------
    names : sequence of str
        Names of the table, or device files.
    study_on : callable
        Captures the step for a device.
    solver, effort
        For each device.
    **offload
        Options of :meth:`planner.analysis.study.Study.plan` on the host's memory.

    Raises
    ------
    UsageError
        If a device is not known.
    """

    def __init__(
        self,
        names: Sequence[str],
        study_on: Callable[[str], Study],
        *,
        solver: str = "auto",
        effort: SolveLimits,
        **offload: Any,
    ) -> None:
        self.devices = {name: find(name) for name in names}
        self.study_on = study_on
        self.solver = solver
        self.effort = effort
        self.offload = offload
        self.rows: tuple[DeviceRow, ...] = ()

    def run(self, *, progress: Progress | None = None) -> None:
        """Capture and plan for each device."""
        for name, spec in self.devices.items():

            def tell(line: str, name: str = name) -> None:
                if progress is not None:
                    progress(f"{name}: {line}")

            tell("capturing forward and backward")
            study = self.study_on(name)
            outcome = ask(
                study, spec.memory_bytes, solver=self.solver, effort=self.effort, progress=tell, **self.offload
            )
            row = DeviceRow(
                device=spec.name,
                memory_bytes=spec.memory_bytes,
                baseline_peak_bytes=study.problem().budget_bytes + study.graph.total_static_bytes,
                outcome=outcome,
            )
            self.rows = (*self.rows, row)
