"""A plan and its parts as plain data, and the plan file, schema 1.

Bytes are of the whole device: what is resident is included. A plan file is data and nothing else. Reading one trusts
nothing: each field's type and range is checked, and whatever is wrong ends in one
:class:`~planner.errors.PlanFileError` that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from planner.common import json_reader
from planner.common.atomic import write_text
from planner.common.json_reader import attributes, parse, to_data
from planner.errors import InfeasibleBudgetError, PlanFileError, PlanMismatchError
from planner.findings.finding import Finding
from planner.ir.graph import TrainingGraph
from planner.ir.order import order_with, renumbered, reordered_graph
from planner.ir.schedule import Schedule
from planner.ir.static_memory import OUTPUTS
from planner.plans.offload import Offloading, with_offloads
from planner.plans.values import ValueTable

SCHEMA = 1
"""Version of the JSON that reports and plan files share."""


def header(of: Any) -> dict[str, Any]:
    """Return the head of every report: model, device, and the step without recompute."""
    return {
        "schema": SCHEMA,
        **attributes(of, "model", "torch", "device", "cost_model"),
        "baseline": {"peak_bytes": of.baseline_peak_bytes, "step_seconds": of.baseline_step_seconds},
    }


_OF_THE_FILE = ("fingerprint", "decisions", "order", "values")
"""Keys that a plan file has beside those of a report."""

OWN = "this plan"
"""Name of a plan among the ways that it is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakLocation:
    """Where in the step the peak is.

    An operator, as ``"aten.mm.default"``; the path of its module, ``""`` for the model itself; ``file:line`` of the
    user's code, ``""`` if unknown; the phase, ``"recompute"`` for a run after the first.
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
    """What a plan does with one layer."""

    module: str
    """Path of the layer, ``""`` for what the model itself does."""
    block: bool
    """Whether it is one of a numbered row of blocks."""
    saved_bytes: int
    """Activations that it makes in the forward and that are held until the backward."""
    freed_bytes: int = field(metadata={"signed": True})
    """Activations that the step without recompute holds until the backward, and the plan does not."""
    recomputed: int
    """Runs beyond the first of its operations, each counted by itself where several are one kernel."""
    added_seconds: float
    """Time of these runs."""
    forward_seconds: float
    """Time of its forward: what recomputing all of it would add."""
    targets: dict[str, int] = field(default_factory=dict)
    """These runs by operator."""
    offloaded_bytes: int = field(default=0, metadata={"older": True})
    """Activations that it makes in the forward and that wait in the host's memory for the backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """A way to train the step, in a comparison: a baseline or a present set-up.

    If there is no such schedule, peak and overhead are None, and there is a reason. ``seconds`` is the time to find it,
    ``fits`` whether it keeps the budget in question. It may also have what is proven of all plans for its peak, or for
    the budget in question.
    """

    name: str
    peak_bytes: int | None = None
    overhead: float | None = None
    seconds: float = 0.0
    fits: bool = False
    reason: str = ""
    host_bytes: int = field(default=0, metadata={"left_out": True})
    lower_bound_overhead: float | None = field(default=None, metadata={"left_out": True})

    @property
    def gap(self) -> float | None:
        """Overhead beyond the lower bound."""
        known = self.lower_bound_overhead is not None and self.overhead is not None
        return self.overhead - self.lower_bound_overhead if known else None  # type: ignore[operator]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerStep:
    """Bytes and seconds of the model's own eager step.

    The peak is of the whole device.
    """

    peak_bytes: int
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedMemory:
    """What CUDA's caching allocator is predicted to report.

    Peaks of ``torch.cuda.memory_allocated``, which counts blocks whole and so is a little above the tensors, and of
    ``torch.cuda.memory_reserved``: segments, with the holes in them.
    """

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEager:
    """Measurements of plain eager steps, beside those with the plan."""

    peak_bytes: int
    overhead: float = field(metadata={"signed": True})
    """Measured step time with the plan over that of the model's own step, less one."""
    equal: bool
    """Whether loss, gradients and buffers agree to the last bit; capture alone may change some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Measurements of real steps with and without the plan."""

    peak_bytes: int
    baseline_peak_bytes: int
    """Measured peaks with and without the plan."""
    overhead: float = field(metadata={"signed": True})
    """Measured step time with the plan over that without it, less one."""
    loss_equal: bool
    gradients_bitwise_equal: bool
    buffers_equal: bool
    """Whether the two agree to the last bit."""
    differences: tuple[str, ...] = ()
    """One line for each thing that differs by more than the tolerance."""
    steps: int = 1
    """Steps that were run each way."""
    tolerance: float = 0.0
    """What the runtime allows; 0 means equal to the last bit."""
    from_one_piece: float = field(default=0.0, metadata={"older": True})
    """How far loss and gradients are from those of the step in one piece, if the plan's is in chunks: the largest
    difference as a share of the length, see :func:`planner.diagnose.verification.distance`."""
    control: float | None = field(default=None, metadata={"left_out": True})
    """How far two steps without the plan were from each other, where kernels may differ from run to run (CUDA
    without ``torch.use_deterministic_algorithms``): the largest difference as a share of the length. The tolerance
    follows from it; 0 demands bits."""
    eager: MeasuredEager | None = field(default=None, metadata={"left_out": True})
    """The model's own step, where the plan is held against that."""

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
    """Where the graph and the costs of a plan come from, with warnings on the costs; the report says so.

    The fingerprint is what the plan is made for: model class, shapes, dtypes, versions, hash of the graph.
    """

    fingerprint: Mapping[str, str | int] = field(default_factory=dict)
    capture_seconds: float = 0.0
    cost_model: str = "roofline"
    device: str = "cpu"
    torch_version: str = ""
    runtime: str = "graph"
    warnings: tuple[Finding, ...] = ()
    eager: EagerStep | None = None
    """The model's own step, if that is known and another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """The highest of a few consecutive runs of operations, mostly of one: when the first of them begins, and what runs.

    ``size_bytes`` is what the whole device holds then; the phase is ``"recompute"`` for a run after the first.
    """

    seconds: float
    size_bytes: int
    operation: str
    module: str
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When the step ends, when its backward begins, and points in order of time: the highest is the peak, exactly."""

    step_seconds: float
    backward_seconds: float
    points: tuple[TimelinePoint, ...]

    @property
    def peak_bytes(self) -> int:
        """The highest point."""
        return max((point.size_bytes for point in self.points), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveTensors:
    """Equal tensors that are live at the peak: how many, and their bytes together.

    Kinds are those of the anatomy of the peak, ``""`` for all that are too small for a row of their own. Modules that
    differ only in numbers are one: ``"transformer.h.0-11.attn"``.
    """

    count: int
    size_bytes: int
    kind: str
    operation: str
    module: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMemory:
    """A larger budget for the whole device, and the overhead of the cheapest plan found for it in little time."""

    budget_bytes: int
    overhead: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDetails:
    """The step over time, without recompute and as planned, and what it has made that is there at the peak."""

    before: Timeline = field(metadata={"at": "timeline.before"})
    after: Timeline = field(metadata={"at": "timeline.after"})
    alive: tuple[AliveTensors, ...] = field(metadata={"at": "alive_at_peak"})
    one_more_gib: MoreMemory | None = None
    modules: tuple[LayerPlacement, ...] = field(default=(), repr=False, metadata={"columns": True, "left_out": True})
    """What happens to every module, each without its parts, in forward order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedOrder:
    """The captured order's figures, beside a plan that runs operations in another order.

    ``moved`` operations run earlier or later. ``recompute_seconds`` is what the cheapest plan adds that was found with
    all in their place; None if none was found that fits, or this one recomputes nothing and there was no search.
    """

    moved: int
    recompute_seconds: float | None = field(default=None, metadata={"left_out": True})


@dataclass(frozen=True, slots=True)
class CallMemory:
    """What a call holds above what is resident: outputs and their gradients are the loop's once it has returned.

    At most in its forward; saved when it has returned; at most in its backward, and in one that keeps the graph and so
    frees nothing that is saved.
    """

    forward_bytes: int
    saved_bytes: int
    backward_bytes: int
    keeping_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to save, recompute and offload, what that costs, and how near it is to the lower bound."""

    model: str
    """Name of the model."""
    fingerprint: dict[str, str | int]
    """What the plan was made for: model class, shapes, dtypes, versions, hash of the graph."""
    status: Literal["optimal", "feasible"]
    """``"optimal"`` (the overhead equals the proven bound) or ``"feasible"``."""
    budget_bytes: int
    """What the whole device may hold at any moment."""
    static_bytes: dict[str, int]
    """What is resident before the step, by kind."""
    baseline_peak_bytes: int = field(metadata={"at": "baseline.peak_bytes"})
    baseline_step_seconds: float = field(metadata={"at": "baseline.step_seconds"})
    """The step as it is captured, without recompute."""
    peak_bytes: int = field(metadata={"at": "predicted.peak_bytes"})
    """Predicted peak."""
    peak_at: PeakLocation = field(metadata={"at": "predicted.peak_at"})
    """Where it occurs."""
    recompute_seconds: float = field(metadata={"at": "predicted.recompute_seconds"})
    """Predicted time of all recomputations."""
    lower_bound_seconds: float = field(metadata={"at": "lower_bound.recompute_seconds"})
    """Proven: no plan within the budget, in this base order, adds less time."""
    minimum_feasible_peak_bytes: int
    """Smallest peak for which a plan is known."""
    solver: str = field(metadata={"at": "solver.name"})
    solve_seconds: float = field(metadata={"at": "solver.seconds"})
    capture_seconds: float
    cost_model: str
    device: str
    torch: str
    """How it was made."""
    anatomy: dict[str, int] = field(metadata={"at": "predicted.anatomy_bytes"})
    """What is alive at the peak, by kind; adds up to the peak."""
    placement: tuple[LayerPlacement, ...]
    """What happens to each layer, in forward order."""
    baselines: tuple[ComparisonRow, ...]
    """Other ways, and last the plan itself."""
    recomputations: dict[str, tuple[str, ...]] = field(metadata={"at": "decisions"})
    """The decisions: for an operation's key, the keys of what is recomputed right before it."""
    proven_minimum_peak_bytes: int = field(default=0, metadata={"left_out": True})
    """Proven: no plan has a lower peak, in this order of operations and those tried. 0 if it was not searched for."""
    order: dict[str, tuple[str, ...]] = field(default_factory=dict, metadata={"left_out": True})
    """Where operations run in another order than they were captured in: for an operation's key, the keys of those that
    run right before it instead; ``""`` stands for the end of the step."""
    captured_order: CapturedOrder | None = field(default=None, metadata={"left_out": True})
    """Figures of the captured order, if the plan has another."""
    warnings: tuple[Finding, ...] = ()
    """What limits it, and what its costs leave out."""
    cache_seconds: float = field(
        default=0.0, metadata={"at": "predicted.cache_seconds", "left_out": True, "signed": True}
    )
    """How much longer the planned step takes than its runs cost, due to caches; negative if shorter."""
    eager: EagerStep | None = field(default=None, metadata={"left_out": True})
    """The model's own step: percentages are of its peak. None where it is not known, or is the step that is planned."""
    verification: Verification | None = field(default=None, metadata={"at": "measured", "left_out": True})
    """What real steps showed, once they have been run."""
    optimizer_step_bytes: int = field(default=0, metadata={"at": "optimizer_step.temporary_bytes"})
    """Temporaries of the optimizer's step."""
    optimizer_peak_bytes: int = field(default=0, metadata={"at": "optimizer_step.peak_bytes"})
    """What the device holds during that step, which comes after the backward."""
    reserved: ReservedMemory | None = field(default=None, metadata={"at": "predicted.cuda_allocator", "left_out": True})
    """What CUDA's allocator is predicted to report."""
    runtime: str = "graph"
    """Name of the runtime that the plan is made for."""
    details: StepDetails | None = field(default=None, metadata={"left_out": True})
    """The step over time, and what fills its peak."""
    values: ValueTable | None = field(default=None, metadata={"left_out": True})
    """What it does with each value that the backward waits for; made where a plan is compared with other ways."""
    offloading: Offloading | None = field(default=None, metadata={"at": "offload", "left_out": True})
    """What is offloaded, if that was allowed."""
    kept: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict, metadata={"left_out": True})
    """For a module that ``torch.utils.checkpoint`` recomputes, what is not recomputed because its outputs are kept: for
    an operator, which of its calls within the module."""
    operations: tuple[OperationRow, ...] = field(default=(), compare=False, repr=False)
    """Every operation with its cost. Not part of a plan file, nor of comparisons."""
    call_memory: CallMemory | None = field(default=None, compare=False, repr=False)
    """What a call holds in its forward and its backward; not part of a plan file either."""

    @property
    def overhead(self) -> float:
        """Predicted time of recompute, and of waiting for transfers, over the step without them."""
        return self.relative(self.added_seconds)

    @property
    def added_seconds(self) -> float:
        """Predicted time of all recomputations, and of waiting for transfers."""
        return self.recompute_seconds + (self.offloading.stall_seconds if self.offloading else 0.0)

    def over_eager(self, overhead: float) -> float:
        """Return an overhead over the step without recompute as one over the model's own step, if that is known.

        Where something is recomputed, caches hold what they hold for this plan.
        """
        if self.eager is None or self.eager.step_seconds <= 0:
            return overhead
        cache_seconds = self.cache_seconds if overhead > 0 else 0.0
        return ((1 + overhead) * self.baseline_step_seconds + cache_seconds) / self.eager.step_seconds - 1

    @property
    def step_seconds(self) -> float:
        """Predicted time of the planned step."""
        return self.baseline_step_seconds + self.added_seconds + self.cache_seconds

    @property
    def lower_bound_overhead(self) -> float:
        """Proven: no plan within the budget has a smaller overhead."""
        return self.relative(self.lower_bound_seconds)

    @property
    def total_static_bytes(self) -> int:
        """Everything resident before the step."""
        return sum(self.static_bytes.values())

    @property
    def activation_budget_bytes(self) -> int:
        """What the step may allocate on top of what is resident."""
        return self.budget_bytes - self.total_static_bytes

    @property
    def whole_step_peak_bytes(self) -> int:
        """The larger of the two peaks: that of forward and backward, and that of the optimizer's step."""
        return max(self.peak_bytes, self.optimizer_peak_bytes)

    def relative(self, seconds: float) -> float:
        """Return a time as a ratio of the step without recompute."""
        return seconds / self.baseline_step_seconds if self.baseline_step_seconds > 0 else 0.0

    def schedule_for(self, graph: TrainingGraph) -> Schedule:
        """Map the decisions to a graph; a PlanMismatchError says that it lacks operations, or orders them differently.

        Where the plan has an order of its own, first runs are in that.
        """
        order = order_with(graph, self.order)
        graph = reordered_graph(graph, order) if self.order else graph
        index_of = {operation.key: index for index, operation in enumerate(graph.operations)}
        joined = {key: index for index, operation in enumerate(graph.operations) for key in operation.keys[1:]}
        index_of |= joined  # what is one operation with another runs again with it, or not at all
        named = dict.fromkeys(key for before in self.recomputations.items() for key in (before[0], *before[1]))
        missing = [key for key in named if key not in index_of]
        if missing:
            shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise PlanMismatchError(
                f"the plan for {self.model or 'a model'} names {len(missing)} of {len(named)} operations that "
                f"{graph.name or 'this model'} does not have ({shown}); make a new plan for this model and these shapes"
            )
        before: dict[int, tuple[int, ...]] = {}
        for key, keys in self.recomputations.items():
            again = tuple(index_of[k] for k in keys if k not in joined)
            before[index_of[key]] = (*before.get(index_of[key], ()), *again)
        for index, again in before.items():
            if late := [i for i in again if i >= index]:
                raise PlanMismatchError(
                    f"the plan recomputes {graph.operations[late[0]].key} before {graph.operations[index].key}, "
                    "which comes first in this model; make a new plan for this model and these shapes"
                )
        schedule = with_offloads(graph, Schedule.with_recomputations(graph, before), self.offloading)
        return renumbered(schedule, order) if self.order else schedule

    def holding(self, peak_bytes: int) -> Plan:
        """Return the plan of a step whose peak was measured: more, or less, is reserved beside it.

        Where nothing is reserved, outputs were dropped, or less was saved.
        """
        more_bytes = peak_bytes - self.peak_bytes
        reserve = {"reserve": max(0, self.static_bytes.get("reserve", 0) + more_bytes)}
        anatomy = self.anatomy | reserve
        for kind in (OUTPUTS, *sorted(anatomy.keys() - self.static_bytes.keys(), key=lambda kind: -anatomy[kind])):
            less_bytes = min(max(0, sum(anatomy.values()) - peak_bytes), anatomy.get(kind, 0))
            anatomy |= {kind: anatomy[kind] - less_bytes} if less_bytes else {}
        eager = self.eager and replace(self.eager, peak_bytes=self.eager.peak_bytes + more_bytes)
        reserved = self.reserved and ReservedMemory(
            allocated_bytes=self.reserved.allocated_bytes + more_bytes,
            reserved_bytes=self.reserved.reserved_bytes + max(0, more_bytes),  # segments of another moment may stay
        )
        return replace(
            self,
            peak_bytes=peak_bytes,
            static_bytes=self.static_bytes | reserve,
            anatomy=anatomy,
            baseline_peak_bytes=self.baseline_peak_bytes + more_bytes,
            minimum_feasible_peak_bytes=self.minimum_feasible_peak_bytes + more_bytes,
            proven_minimum_peak_bytes=0,
            eager=eager,
            reserved=reserved,
            details=None,
        )

    def report(self) -> dict[str, Any]:
        """Return the report as plain data, with the JSON keys of schema 1."""
        return {key: content for key, content in self._data().items() if key not in _OF_THE_FILE}

    def to_json(self) -> str:
        """Return the plan file: the report, then the decisions and the fingerprint."""
        data = self._data()
        data |= {key: data.pop(key) for key in _OF_THE_FILE if key in data}
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    def _data(self) -> dict[str, Any]:
        """Return all that a plan file has, derived figures included."""
        data: dict[str, Any] = {"schema": SCHEMA, **to_data(self)}
        data["activation_budget_bytes"] = self.activation_budget_bytes
        data["predicted"]["overhead"] = self.overhead
        # Schema 1 has it beside a key that says recompute; the bound is on recompute and waiting.
        data["lower_bound"]["overhead"] = self.lower_bound_overhead
        return data

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan file's text; a PlanFileError says that it is damaged, of another schema, or not a plan."""
        root = parse(text, "plan")
        schema = root["schema"].read(int)
        if schema != SCHEMA:
            raise PlanFileError(f"the plan is of schema {schema}, and only schema {SCHEMA} can be read here")
        if root["status"].read(str) == "infeasible":
            raise PlanFileError("this is the report of a budget that no plan fits; it contains no plan")
        plan = root.read(cls)
        _check_consistent(plan)
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan file, whole or not at all."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; a PlanFileError says that it cannot be, is damaged, of another schema, or not a plan."""
        return json_reader.load(path, "plan file", cls.from_json, PlanFileError)


class NoPlanFitsError(InfeasibleBudgetError):
    """No plan keeps the budget; ``report`` says so in the JSON keys of schema 1."""

    def __init__(self, message: str, *, report: dict[str, Any], **facts: Any) -> None:
        super().__init__(message, **facts)
        self.report = report


def _check_consistent(plan: Plan) -> None:
    """Refuse a plan whose own numbers contradict each other, as an edited or mixed-up file's do."""
    alive_bytes = sum(plan.anatomy.values())
    if alive_bytes != plan.peak_bytes:
        raise PlanFileError(f"predicted.anatomy_bytes adds up to {alive_bytes}, not to the peak of {plan.peak_bytes}")
    if not (math.isfinite(plan.overhead) and plan.lower_bound_seconds <= plan.added_seconds):
        raise PlanFileError("predicted.recompute_seconds, lower_bound and baseline.step_seconds contradict each other")
    if plan.peak_bytes > plan.budget_bytes:
        raise PlanFileError(f"predicted.peak_bytes is {plan.peak_bytes}, above the budget of {plan.budget_bytes}")
    if plan.optimizer_peak_bytes > plan.budget_bytes:
        raise PlanFileError(f"optimizer_step.peak_bytes is above the budget of {plan.budget_bytes}")
    if plan.total_static_bytes > plan.peak_bytes:
        raise PlanFileError(f"static_bytes adds up to {plan.total_static_bytes}, above the peak of {plan.peak_bytes}")
    for number, row in enumerate(plan.values.rows if plan.values is not None else ()):
        if any(source >= number for source in row.made_from):
            raise PlanFileError(f"values.rows.made_from[{number}] names a row that is not above it")
    details = plan.details
    if details is None:
        return
    for name, timeline, peak_bytes in (
        ("before", details.before, plan.baseline_peak_bytes),
        ("after", details.after, plan.peak_bytes),
    ):
        where = f"details.timeline.{name}"
        if timeline.points and timeline.peak_bytes != peak_bytes:
            raise PlanFileError(f"{where} peaks at {timeline.peak_bytes}, not at {peak_bytes} as the plan says")
        times = [0.0, *(point.seconds for point in timeline.points), timeline.step_seconds]
        if times != sorted(times) or timeline.backward_seconds > timeline.step_seconds:
            raise PlanFileError(f"{where} is not in the order of time")
    alive_bytes = sum(row.size_bytes for row in details.alive)
    if alive_bytes > plan.peak_bytes - plan.total_static_bytes:
        raise PlanFileError(f"details.alive_at_peak adds up to {alive_bytes}, above what the step makes")
