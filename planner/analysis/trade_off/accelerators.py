"""Which devices a step fits, and what recompute costs there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.analysis.study import Study
from planner.analysis.trade_off.outcome import Outcome, ask
from planner.common.json_reader import attributes
from planner.common.options import Offload, Search
from planner.plans.device_file import find


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
