"""The plan of one device of a pipeline, as plain data. All bytes are of the whole device."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plans.plan import Plan


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
