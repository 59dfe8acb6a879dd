"""The plan of a pipeline, as plain data. All bytes are of the whole device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from planner.common.json_reader import attributes
from planner.extras.pipelines.schedules import PipelineSchedule
from planner.plans.plan import SCHEMA, Plan


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What one device of a pipeline does."""

    index: int
    """Its place in the pipeline; the first has the first layers."""
    layers: tuple[tuple[str, ...], ...]
    """For each of its chunks, the paths of its layers."""
    micro_batches_in_flight: int
    """At most, the one at work included; counted in chunks where there are several."""
    saved_bytes: tuple[int, ...]
    """For each chunk, what a micro-batch holds while it waits for its backward."""
    plans: tuple[Plan, ...]
    """For each chunk, the plan of one micro-batch; peaks and static bytes are those of the device, with all that is in
    flight."""

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the device."""
        return max(plan.whole_step_peak_bytes for plan in self.plans)

    @property
    def baseline_peak_bytes(self) -> int:
        """The peak without recompute."""
        return max(plan.baseline_peak_bytes for plan in self.plans)

    @property
    def baseline_seconds(self) -> float:
        """Time of one micro-batch, forward and backward, without recompute."""
        return sum(plan.baseline_step_seconds for plan in self.plans)

    @property
    def recompute_seconds(self) -> float:
        """Time of the recomputations for one micro-batch."""
        return sum(plan.recompute_seconds for plan in self.plans)

    @property
    def lower_bound_seconds(self) -> float:
        """Proven: no plan of this device within the budget recomputes for less time."""
        return sum(plan.lower_bound_seconds for plan in self.plans)

    @property
    def overhead(self) -> float:
        """Recompute time over the stage's own time without recompute."""
        return self.recompute_seconds / self.baseline_seconds if self.baseline_seconds > 0 else 0.0

    def report(self) -> dict[str, Any]:
        """Return what stands of it in the pipeline's report."""
        layout = ("index", "layers", "micro_batches_in_flight", "saved_bytes")
        costs = ("peak_bytes", "baseline_peak_bytes", "baseline_seconds", "recompute_seconds", "overhead")
        return {**attributes(self, *layout, *costs), "chunks": [plan.report() for plan in self.plans]}


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Plans for all devices of a pipeline under one budget for each."""

    model: str
    """Name of the model."""
    schedule: PipelineSchedule
    """In which order each device works on the micro-batches."""
    budget_bytes: int
    """What each device may hold."""
    stages: tuple[StagePlan, ...]
    """From the first layers to the last."""

    @property
    def binding_stage(self) -> int:
        """The stage that would need most without recompute: to give it less to hold helps most."""
        return max(self.stages, key=lambda stage: stage.baseline_peak_bytes).index

    @property
    def slowest_stage(self) -> int:
        """The stage that takes longest for a micro-batch, and so paces all."""
        return max(self.stages, key=lambda stage: stage.baseline_seconds + stage.recompute_seconds).index

    @property
    def peak_bytes(self) -> int:
        """The highest peak of a device."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def overhead(self) -> float:
        """How much longer the slowest stage takes than the slowest one without recompute."""
        return self._relative(max(stage.baseline_seconds + stage.recompute_seconds for stage in self.stages))

    @property
    def lower_bound_overhead(self) -> float:
        """Proven: no plans of these stages within the budget have a smaller overhead."""
        return self._relative(max(stage.baseline_seconds + stage.lower_bound_seconds for stage in self.stages))

    def _relative(self, seconds: float) -> float:
        before = max(stage.baseline_seconds for stage in self.stages)
        return seconds / before - 1 if before > 0 else 0.0

    def report(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "status": "fits",
            "pipeline": asdict(self.schedule),
            **attributes(self, "budget_bytes", "peak_bytes", "overhead", "lower_bound_overhead"),
            **attributes(self, "binding_stage", "slowest_stage"),
            "stages": [stage.report() for stage in self.stages],
        }
