"""Measured costs: each distinct operation was run on the device, here or elsewhere.

A :class:`Profile` holds what was measured, as plain data; ``planner.measure.profiling`` makes one. An
operation that it does not know costs what the roofline says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cost_models.base import CostedOperation, OperationCost
from cost_models.devices import DeviceSpec
from cost_models.roofline import RooflineCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What running one operation took: the median of so many runs, and what the first one in a step takes on top."""

    seconds: float
    cold_seconds: float = field(default=0.0, metadata={"left_out": True})
    runs: int = 1
    workspace_bytes: int = 0
    """What the kernel allocated beyond its outputs."""

    @property
    def cost(self) -> OperationCost:
        """What a plan counts for one run."""
        return OperationCost(seconds=self.seconds, workspace_bytes=self.workspace_bytes, cold_seconds=self.cold_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledOperation:
    """One operation of the step that a profile was made of."""

    key: str
    """Its place in the model."""
    signature: str
    """What it was called with."""
    target: str
    dtype: str
    flops: int
    moved_bytes: int

    @property
    def name(self) -> str:
        """Its key: what a cost model calls a name."""
        return self.key


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs of one step, by the names of model and device, the version of torch and the day."""

    model: str
    device: str
    torch: str
    date: str
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of what the step was called with, parameters left out."""
    measurements: Mapping[str, Measurement] = field(hash=False)
    """By signature."""
    operations: tuple[ProfiledOperation, ...] = ()
    """In base order."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The cost model of this file; without a profile, all costs are the roofline's."""

    device: DeviceSpec
    profile: Profile | None = None
    name: ClassVar[str] = "measured"

    def costs(self, operations: Sequence[CostedOperation]) -> tuple[OperationCost, ...]:
        """Return the cost of one run of each operation, in their order."""
        estimates = RooflineCosts(self.device).costs(operations)
        return filled(operations, estimates, self.profile) if self.profile else estimates


def filled(
    operations: Sequence[CostedOperation], estimates: Sequence[OperationCost], profile: Profile
) -> tuple[OperationCost, ...]:
    """Return what was measured of each operation, and the estimate with its workspace where nothing was."""
    known = profile.measurements
    return tuple(
        known[operation.signature].cost if operation.signature in known else estimate
        for operation, estimate in zip(operations, estimates, strict=True)
    )


COST_MODEL = MeasuredCosts
