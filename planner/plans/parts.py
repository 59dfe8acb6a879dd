"""The parts of a plan, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.findings.finding import Finding

SCHEMA = 1
"""Version of the JSON that reports and plan files share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakLocation:
    """Where in the step the peak stands.

    Parameters
    ----------
    operation : str
        The operator, for example ``"aten.mm.default"``.
    module : str
        Path of the module that it comes from, ``""`` for the model itself.
    source : str
        ``file:line`` of the user's code, ``""`` if unknown.
    phase : str
        ``"forward"``, ``"loss"`` or ``"backward"``; ``"recompute"`` for a run after the first.
    """

    operation: str
    module: str = ""
    source: str = ""
    phase: str = ""

    def __str__(self) -> str:
        place = self.operation or "the end of the step"
        if self.module:
            place += f" in {self.module}"
        if self.source:
            place += f" ({self.source})"
        return place


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlacement:
    """What a plan does with one layer.

    Parameters
    ----------
    module : str
        Path of the layer, ``""`` for what the model itself does.
    block : bool
        Whether it is one of a numbered row of blocks.
    saved_bytes : int
        Activations that it makes in the forward and that are held until the backward.
    freed_bytes : int
        Activations that the step without recompute holds until the backward, and the plan does not.
    recomputed : int
        Runs beyond the first of its operations.
    added_seconds : float
        Time of these runs.
    forward_seconds : float
        Time of its forward: what recomputing all of it would add.
    targets : dict of str to int
        These runs by operator.
    offloaded_bytes : int
        Activations that it makes in the forward and that wait in the host's memory for the backward.
    """

    module: str
    block: bool
    saved_bytes: int
    freed_bytes: int
    recomputed: int
    added_seconds: float
    forward_seconds: float
    targets: dict[str, int] = field(default_factory=dict)
    offloaded_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRow:
    """One way to spend memory or time, beside the plan.

    Parameters
    ----------
    name : str
        ``"none"``, ``"every layer"``, ...
    peak_bytes : int, optional
        Simulated peak, ``None`` if there is no such schedule.
    overhead : float, optional
        Recompute time over step time without recompute.
    seconds : float
        Time to find it.
    fits : bool
        Whether the peak keeps the budget.
    reason : str
        Why there is no such schedule.
    """

    name: str
    peak_bytes: int | None = None
    overhead: float | None = None
    seconds: float = 0.0
    fits: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedMemory:
    """What CUDA's caching allocator is predicted to report.

    Parameters
    ----------
    allocated_bytes : int
        Peak of ``torch.cuda.memory_allocated``: blocks are counted whole, so it is a little above the tensors.
    reserved_bytes : int
        Peak of ``torch.cuda.memory_reserved``: segments, with the holes in them.
    """

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What real steps with and without the plan showed.

    Parameters
    ----------
    peak_bytes, baseline_peak_bytes : int
        Measured peaks with and without the plan.
    overhead : float
        Measured step time with the plan over that without it, less one.
    loss_equal, gradients_bitwise_equal, buffers_equal : bool
        Whether the two agree to the last bit.
    differences : tuple of str
        One line for each thing that differs by more than the tolerance.
    steps : int
        Steps that were run each way.
    tolerance : float
        What the runtime allows; 0 means equal to the last bit.
    from_one_piece : float
        How far loss and gradients are from those of the step in one piece, if the plan's is in slices: the largest
        difference as a share of the length, see :func:`planner.diagnose.verification.distance`.
    rounding_error : float, optional
        How far loss and gradients are from those of exact copies, if values are rounded on their way to the host: the
        largest difference as a share of the length, and ``tolerance`` what is allowed of it, in any type.
    """

    peak_bytes: int
    baseline_peak_bytes: int
    overhead: float
    loss_equal: bool
    gradients_bitwise_equal: bool
    buffers_equal: bool
    differences: tuple[str, ...] = ()
    steps: int = 1
    tolerance: float = 0.0
    from_one_piece: float = 0.0
    rounding_error: float | None = None

    @property
    def exact(self) -> bool:
        """Whether loss, gradients and buffers all agree to the last bit."""
        return self.loss_equal and self.gradients_bitwise_equal and self.buffers_equal

    @property
    def agrees(self) -> bool:
        """Whether they agree as closely as the runtime promises."""
        return not self.differences and (self.exact or self.tolerance > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """What one operation of the step costs, and how often the plan runs it."""

    operation: str
    module: str
    phase: str
    flops: int
    moved_bytes: int
    seconds: float
    workspace_bytes: int
    output_bytes: int
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrigin:
    """Where the graph and the costs of a plan come from; it says so in the report.

    Parameters
    ----------
    fingerprint : dict of str to str or int
        What the plan is made for: model class, shapes, dtypes, versions, hash of the graph.
    capture_seconds : float
    cost_model, device, torch_version : str
    warnings : tuple of Finding
        On the costs.
    """

    fingerprint: Mapping[str, str | int] = field(default_factory=dict)
    capture_seconds: float = 0.0
    cost_model: str = "roofline"
    device: str = "cpu"
    torch_version: str = ""
    runtime: str = "graph"
    warnings: tuple[Finding, ...] = ()
