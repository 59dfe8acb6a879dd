"""What a report shows beside a plan's decisions, as plain data: the step over time, and what fills its peak."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.plans.parts import LayerPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """The highest of a few consecutive runs of operations; mostly of one.

    Parameters
    ----------
    seconds : float
        When the first of them begins.
    size_bytes : int
        What the whole device holds during the highest.
    operation, module, phase : str
        What runs then; the phase is ``"recompute"`` for a run after the first.
    """

    seconds: float
    size_bytes: int
    operation: str
    module: str
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What the device holds over the step.

    Parameters
    ----------
    step_seconds : float
        When the step ends.
    backward_seconds : float
        When the backward begins.
    points : tuple of TimelinePoint
        In the order of time. The highest is the peak, exactly.
    """

    step_seconds: float
    backward_seconds: float
    points: tuple[TimelinePoint, ...]

    @property
    def peak_bytes(self) -> int:
        """The highest point."""
        return max((point.size_bytes for point in self.points), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveTensors:
    """Tensors of one make that are there at the peak.

    Parameters
    ----------
    count, size_bytes : int
        How many, and how much they hold together.
    kind : str
        As the anatomy of the peak calls them; ``""`` for all that are too small for a row of their own.
    operation, module, source : str
        What made them. Modules that differ only in numbers are one: ``"transformer.h.0-11.attn"``.
    """

    count: int
    size_bytes: int
    kind: str
    operation: str
    module: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMemory:
    """What a larger budget would buy.

    Parameters
    ----------
    budget_bytes : int
        For the whole device.
    overhead : float
        Of the cheapest plan that was found for it in little time.
    """

    budget_bytes: int
    overhead: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Memory that the planned step takes and gives back.

    Parameters
    ----------
    size_bytes : int
    born, died : int
        Positions of the first and the last run during which it is there.
    kind, operation, module, source : str
        What it is, and what made it.
    """

    size_bytes: int
    born: int
    died: int
    kind: str
    operation: str
    module: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDetails:
    """The step over time, and what fills its peak.

    Parameters
    ----------
    before, after : Timeline
        Without recompute, and as planned.
    alive : tuple of AliveTensors
        What the step has made that is there at the peak, the largest first.
    one_more_gib : MoreMemory, optional
        What a budget larger by a GiB would buy.
    modules : tuple of LayerPlacement
        What happens to every module. Not part of a plan file, nor of comparisons.
    allocations : tuple of Allocation
        All memory of the planned step. Not part of a plan file, nor of comparisons.
    """

    before: Timeline
    after: Timeline
    alive: tuple[AliveTensors, ...]
    one_more_gib: MoreMemory | None = None
    modules: tuple[LayerPlacement, ...] = field(default=(), compare=False, repr=False)
    allocations: tuple[Allocation, ...] = field(default=(), compare=False, repr=False)
