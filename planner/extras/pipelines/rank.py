"""Plan and wrap the stages of one rank of a pipeline that runs: sizes from rank to rank, then each rank for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from planner import runtimes
from planner.analysis.compatibility import check_solver
from planner.analysis.study import Study
from planner.api import unwrap
from planner.capture.inputs import Inputs, check_model, check_plannable
from planner.capture.joint import is_deferred
from planner.capture.joint_capture import run_without_data
from planner.capture.lowering import LoweredGraph
from planner.capture.model_facts import is_sharded, of_model, shards_of, units_of, unplanned_sharding, whole
from planner.capture.module_internals import has_gradient_hooks
from planner.capture.planned_call import install_planned_call
from planner.capture.sharding import ROOT, Unit, resident
from planner.capture.torch_internals import entered
from planner.common.options import Budget, Search, Target, Training
from planner.common.units import Size, round_up
from planner.errors import InfeasibleBudgetError, UsageError
from planner.extras.pipelines.deferred_weight_grads import LaterWeights
from planner.extras.pipelines.devices import Device, no_plan_fits
from planner.extras.pipelines.pipelining_internals import RankOfPipeline
from planner.extras.pipelines.plan import StagePlan
from planner.extras.pipelines.schedules import Boundary, left_by, loads
from planner.extras.pipelines.stages import Stage, whole_stage
from planner.ir.graph import Phase, TrainingGraph
from planner.ir.static_memory import LossMemory, LossPasses, StaticMemory
from planner.measure import loss
from planner.measure.devices import device_spec
from planner.measure.resident import static_memory
from planner.plans.plan import NoPlanFitsError, Plan
from planner.report.progress import tell
from planner.session.rank_consensus import check_alike, made_by_all
from planner.session.step import Options, captured, lower_as_run, study_lowered

SHARES = "shares of gradients"

RECEIVED = "received gradients"
"""Kind of the buffers that gradients arrive in, one for each micro-batch."""


@dataclass(frozen=True)
class _Layout:
    """How a tensor that one stage hands to the next lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    @property
    def size_bytes(self) -> int:
        """Bytes of the memory that it lies in."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize if all(self.shape) else 0

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a tensor that lies so, of any numbers."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.requires_grad_(self.requires_grad)


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage's module, its plan for one micro-batch, and the options under which it was captured."""

    module: nn.Module
    plan: Plan
    options: Options


@dataclass(frozen=True, kw_only=True)
class _Captured:
    module: nn.Module
    is_last: bool
    given: Sequence[torch.Tensor]
    """What it is given for one micro-batch from outside of this rank."""
    outputs: Sequence[_Layout]
    options: Options
    study: Study
    part: Stage
    boundary: Boundary


def plan_rank(
    rank: RankOfPipeline,
    example: Inputs,
    target: Any,
    options: Options,
    *,
    return_outputs: bool,
) -> tuple[StagePlan, list[PlannedStage]]:
    """Plan all stages of this rank under one budget, while the other ranks of the pipeline do the same.

    ``example`` is what ``schedule.step`` is called with here. Fails on every rank if it fails on one; see
    :func:`planner.session.rank_consensus.made_by_all`.
    """
    given = made_by_all(lambda: _checked(rank), "checked its stages", rank.group)
    check_alike(given, "pipeline", "All ranks must make the same schedule, with as many micro-batches")
    sizes = _sizes(rank, example)
    planned: list[tuple[StagePlan, list[PlannedStage]]] = []

    def plan() -> None:
        planned.append(_planned(rank, sizes, target, options, return_outputs=return_outputs))

    made_by_all(plan, "planned its stages", rank.group)
    return planned[0]


def _planned(
    rank: RankOfPipeline,
    sizes: Sequence[tuple[Inputs, Sequence[_Layout]]],
    target: Any,
    options: Options,
    *,
    return_outputs: bool,
) -> tuple[StagePlan, list[PlannedStage]]:
    """Plan this rank: with gradients of weights when the schedule asks for them if that fits, and else at once."""
    if rank.splits:
        with suppress(_NotInTwo):
            later = replace(options, deferred=LaterWeights())
            in_two = _Rank(rank, sizes, target, later, return_outputs=return_outputs)
            try:
                return in_two.planned()
            except InfeasibleBudgetError:  # what waits takes memory
                options = replace(options, budget=Budget(in_two.budget_bytes))
    return _Rank(rank, sizes, target, options, return_outputs=return_outputs).planned()


class _NotInTwo(Exception):
    """A stage whose gradients of weights cannot wait."""


def _checked(rank: RankOfPipeline) -> dict[str, str | int]:
    for stage in rank.stages:
        if isinstance(stage.submod, DistributedDataParallel):
            raise UsageError(
                f"stage {stage.stage_index} is inside DDP, whose buffers are not planned within a pipeline: make "
                "stages of plain modules, shard them with fully_shard(stage), or run them without a plan"
            )
        check_model(stage.submod, may_be_sharded=True)
        if is_sharded(stage.submod) and (why := _unplanned(rank, stage.submod)):
            raise UsageError(
                f"stage {stage.stage_index} is sharded with FSDP2, and {why}: within a pipeline that is not planned"
            )
    return rank.facts


def _unplanned(rank: RankOfPipeline, module: nn.Module) -> str:
    """Say what stands in the way of planning a sharded stage; ``""`` if nothing does."""
    if not rank.is_single:
        return "the schedule has several stages on each rank. Use Schedule1F1B or ScheduleGPipe"
    units = units_of(module)
    if [unit.path for unit in units] != [ROOT]:
        return "in parts. Shard the whole stage at once, fully_shard(stage), and nothing inside"
    if shards_of(module) == 1:
        return "over this rank alone. Leave fully_shard out"
    unit = units[0].unit
    if replace(unit, parameters=(), finds=frozenset()) != Unit(parameters=(), stays=True, copies=unit.copies):
        return "with settings of its own. Leave resharding, prefetching, offload and sending as they are"
    if any(p.item_bytes != p.share_item_bytes or p.spread_item_bytes != p.item_bytes for p in unit.parameters):
        return "in mixed precision"
    return unplanned_sharding(module, (), None) or ""


def _sizes(rank: RankOfPipeline, example: Inputs) -> list[tuple[Inputs, list[_Layout]]]:
    """Return what each stage of this rank is given for one micro-batch, and what it gives: found stage after stage."""
    found: dict[int, tuple[Inputs, list[_Layout]]] = {}
    own = {stage.stage_index: stage for stage in rank.stages}

    def run(index: int, given: Sequence[_Layout]) -> list[_Layout] | None:
        if index not in own:
            return None
        args, kwargs = rank.split(example.args, example.kwargs)
        device = torch.device(own[index].device)
        inputs = Inputs(args if index == 0 else tuple(layout.empty(device) for layout in given), kwargs)
        if not inputs.tensors():
            raise UsageError("the first stage is on this rank: give example inputs, as schedule.step is called with")
        module = own[index].submod
        with whole(module):
            check_plannable(module, inputs)
            with run_without_data(module, inputs) as (_, outputs, _):
                found[index] = inputs, _layouts(outputs)
        return found[index][1]

    given: list[_Layout] = []
    for index in range(rank.stages[0].num_stages):
        made = made_by_all(partial(run, index, given), f"ran stage {index} without data", rank.group)
        given = next(layouts for layouts in made if layouts is not None)
    return [found[stage.stage_index] for stage in rank.stages]


def _layouts(outputs: Any) -> list[_Layout]:
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if other := next((output for output in outputs if not isinstance(output, torch.Tensor)), None):
        raise UsageError(f"a stage must return tensors, not {type(other).__name__}: the next stage receives them")
    return [_Layout.of(output) for output in outputs]


class _Rank:
    """Captures the stages of one rank, and plans them as one device."""

    def __init__(
        self,
        rank: RankOfPipeline,
        sizes: Sequence[tuple[Inputs, Sequence[_Layout]]],
        target: Any,
        options: Options,
        *,
        return_outputs: bool,
    ) -> None:
        self.rank, self.target, self.options, self.return_outputs = rank, target, options, return_outputs
        self.ranks = shards_of(rank.stages[0].submod)
        self.spec = device_spec(rank.stages[0].submod, options.target.device)
        self.unit = next((unit.unit for stage in rank.stages for unit in units_of(stage.submod)), None)
        """What a sharded stage gathers for all micro-batches."""
        self.order = rank.order if options.deferred is not None else rank.whole_order
        self.stages = []
        for stage, size in zip(rank.stages, sizes, strict=True):
            with whole(stage.submod):
                self.stages.append(self._captured(stage, *size))

    def planned(self) -> tuple[StagePlan, list[PlannedStage]]:
        """Plan all stages under the rank's budget; NoPlanFitsError if none was found."""
        rank, stages = self.rank, self.stages
        left = left_by(self.order, [stage.boundary for stage in stages], warm_up=rank.warm_up)
        end_bytes = left[-1] + self._merged_bytes()
        if self.unit is not None:
            left, end_bytes = self._gathered(self.unit, left)
        device = Device(
            rank.stages[0].group_rank,
            [stage.part for stage in stages],
            self._around(),
            loads(self.order, len(stages), left[:-1]),
            end_bytes,
        )
        self.budget_bytes = budget_bytes = self.options.budget.in_bytes(device.keep_all.peak_bytes, device.static_bytes)
        made = device.planned(budget_bytes, self.options.search, [stage.study.origin for stage in stages])
        if made is None:
            message, report = no_plan_fits(device, budget_bytes, f"rank {device.index} of the pipeline binds, ")
            smallest_bytes = report["minimum_feasible_peak_bytes"]
            raise NoPlanFitsError(
                message, minimum_feasible_peak_bytes=smallest_bytes, operation=f"rank {device.index}", report=report
            )
        made = replace(made, weights_later=self.options.deferred is not None)
        return made, [self._to_run(stage, plan) for stage, plan in zip(stages, made.plans, strict=True)]

    def _gathered(self, unit: Unit, left: Sequence[int]) -> tuple[list[int], int]:
        """Add what a sharded stage holds during each pass, and at the end, whole gradients apart.

        The first forward gathers its parameters, for all passes; the gather's buffer is there until it is over. When
        all passes are over the parameters go, and then the whole gradients, which are copied to be spread.
        """
        padded = [(p, p.padded(self.ranks)) for p in unit.parameters]
        gathered_bytes = sum(self.aligned(count * p.item_bytes) for p, count in padded)
        buffer_bytes = self.aligned(sum(count * p.item_bytes for p, count in padded))
        spread_bytes = self.aligned(sum(count * p.spread_item_bytes for p, count in padded if p.trainable))
        whole_bytes = sum(stage.part.gradient_bytes for stage in self.stages)
        passes = [held + gathered_bytes for held in left[:-1]]
        passes[0] += buffer_bytes
        merged_bytes = spread_bytes // self.ranks - whole_bytes + self._merged_bytes()
        return [*passes, left[-1]], left[-1] + max(spread_bytes, merged_bytes)

    def _captured(self, stage: Any, inputs: Inputs, outputs: Sequence[_Layout]) -> _Captured:
        module, begun = stage.submod, time.perf_counter()
        options, taken = self._with_loss(stage, inputs)
        step = lower_as_run(module, captured(module, inputs, options), options)
        study = study_lowered(module, replace(step, capture_seconds=time.perf_counter() - begun), options)
        assert study.in_place is not None
        here = {value: index for index, value in enumerate(study.in_place.values)}
        at_turn = study.graph.operations[study.graph.loss_index]
        part = whole_stage(
            study.graph,
            study.costs,
            gradient_bytes=_gradient_bytes(module, step.lowered, self.aligned),
            input_gradients=[here[value] for value in _input_gradients(module, step.lowered)],
            received=[v for v in at_turn.outputs if study.graph.values[v].kind == "tangent"],
            loss=taken,
            rest=_rest(module, study.graph, step.lowered) if options.deferred is not None else None,
        )
        return _Captured(
            module=module,
            is_last=stage.is_last,
            given=list(replace(inputs, args=()).tensors() if self.rank.takes_over(stage) else inputs.tensors()),
            outputs=outputs,
            options=options,
            study=study,
            part=part,
            boundary=self._boundary(stage, inputs, study.graph, taken),
        )

    def _with_loss(self, stage: Any, inputs: Inputs) -> tuple[Options, LossPasses | None]:
        """Return the options for a stage, and what the loss takes if it is the last.

        The loss is counted here, and not by whoever runs the stage's module: of that it is told the outputs alone.
        """
        if not stage.is_last:
            return replace(self.options, loss=LossMemory(is_known=True)), None
        if self.target is None:
            raise UsageError("the last stage is on this rank: give labels, as schedule.step is called with its target")
        target, device = self.rank.target_of(self.target), self.options.target.device
        memory, taken = loss.passes_of(stage.submod, inputs, self.rank.loss, target, device)
        return replace(self.options, loss=LossMemory(is_known=True, outputs=memory.outputs)), taken

    def _boundary(self, stage: Any, inputs: Inputs, graph: TrainingGraph, taken: LossPasses | None) -> Boundary:
        made_bytes = sum(value.size_bytes for value in graph.values if value.retained and value.kind == "output")
        is_sent_back = not (stage.is_first or self.rank.takes_over(stage))
        returned_bytes = sum(self.aligned(t.nbytes) for t in inputs.args if t.requires_grad) * is_sent_back
        if self.rank.hands_over(stage):
            return Boundary(handed_bytes=made_bytes, returned_bytes=returned_bytes)
        if taken is None:
            return Boundary(sent_bytes=made_bytes, returned_bytes=returned_bytes)
        kept_bytes = made_bytes * self.return_outputs
        return Boundary(
            returned_bytes=returned_bytes,
            output_bytes=made_bytes - kept_bytes,
            kept_bytes=kept_bytes + taken.held_bytes,
        )

    def _around(self) -> StaticMemory:
        """Count what is resident: modules, what every micro-batch is given, and buffers for gradients to arrive in."""
        around = self._resident()
        count = self.rank.micro_batches
        given_bytes = sum(self.aligned(t.nbytes) for stage in self.stages for t in stage.given) * count
        if any(stage.is_last for stage in self.stages) and isinstance(self.target, torch.Tensor):
            given_bytes += self.aligned(self.target.nbytes)
        beside = {"inputs": given_bytes}
        received = (
            layout.size_bytes
            for stage in self.stages
            for layout in stage.outputs
            if layout.requires_grad and not stage.is_last
        )
        if received_bytes := count * sum(map(self.aligned, received)):
            beside[RECEIVED] = received_bytes
        return replace(around, static_bytes={**around.static_bytes, **beside})

    def _resident(self) -> StaticMemory:
        """Count the modules, or this rank's shares of them."""
        modules = [stage.module for stage in self.stages]
        training = self.options.training
        if self.unit is None:
            return static_memory(nn.ModuleList(modules), (), self.spec, training)
        (module,) = modules
        with whole(module):
            around = static_memory(module, (), self.spec, replace(training, data_parallel="fsdp2", ranks=self.ranks))
        around = resident(around, {ROOT: self.unit}, self.spec.alignment_bytes)
        # Those of the micro-batches before are whole, and beside the shares of earlier steps.
        static = {SHARES if kind == "gradients" else kind: size for kind, size in around.static_bytes.items()}
        return replace(around, static_bytes=static)

    def _merged_bytes(self) -> int:
        """Return what the outputs of all micro-batches take that are put together for the caller."""
        last = next((made.outputs for made in self.stages if made.is_last), ())
        return self.return_outputs * self.rank.micro_batches * sum(self.aligned(layout.size_bytes) for layout in last)

    def _to_run(self, stage: _Captured, plan: Plan) -> PlannedStage:
        """Return a plan as the module's own runtime is to have it: the gradients that it is given are its own."""
        resident = {kind: size_bytes for kind, size_bytes in plan.static_bytes.items() if kind != RECEIVED}
        options = replace(stage.options, is_stage=True)
        return PlannedStage(module=stage.module, plan=replace(plan, static_bytes=resident), options=options)

    def aligned(self, size_bytes: int) -> int:
        """Round a size up as the allocator does."""
        return round_up(size_bytes, self.spec.alignment_bytes)


def _rest(module: nn.Module, graph: TrainingGraph, lowered: LoweredGraph) -> int:
    """Return the operation from which on only gradients of weights are computed, in a graph that has them last."""
    if has_gradient_hooks(module):
        raise _NotInTwo  # autograd calls them
    nodes = list(zip(lowered.graph.operations, lowered.operation_nodes, strict=True))
    if any(node is None and operation.phase is Phase.BACKWARD for operation, node in nodes):
        raise _NotInTwo  # autograd copies some, and would have to when they come
    late = {operation.key for operation, node in nodes if is_deferred(node)}
    begins = next((index for index, operation in enumerate(graph.operations) if operation.key in late), None)
    if begins is None or not all(operation.key in late for operation in graph.operations[begins:]):
        raise _NotInTwo
    return begins


def _input_gradients(module: nn.Module, lowered: LoweredGraph) -> set[int]:
    """Return the values that are gradients of what a module is given."""
    own = {id(parameter) for parameter in module.parameters()}
    nodes = {gradient for tensor, gradient in _gradients(lowered) if id(tensor) not in own}
    copies = {value for value, node in enumerate(lowered.value_nodes) if node in nodes}
    return copies.union(*(lowered.storage_of[node] for node in nodes))


def _gradient_bytes(module: nn.Module, lowered: LoweredGraph, aligned: Callable[[int], int]) -> int:
    """Return the bytes of the gradients of a module's parameters."""
    own = {id(parameter) for parameter in module.parameters()}
    return sum(aligned(tensor.nbytes) for tensor, _ in _gradients(lowered) if id(tensor) in own)


def _gradients(lowered: LoweredGraph) -> list[tuple[torch.Tensor, fx.Node]]:
    joint = lowered.joint
    pairs = zip(joint.inputs, joint.outputs[1], strict=True)
    return [(tensor, gradient) for tensor, gradient in pairs if isinstance(gradient, fx.Node)]


def wrap_pipeline(
    schedule: Any,
    inputs: Any = None,
    *,
    budget: Budget | Size | None = None,
    labels: Any = None,
    return_outputs: bool = True,
    training: Training | str = Training(),
    search: Search | str = Search(),
    target: Target | str = Target(),
) -> StagePlan:
    """Make the stages of this rank keep a memory budget in a schedule of ``torch.distributed.pipelining``.

    Every rank of the pipeline calls it, after it has made its schedule and before the first step. A rank's stages are
    planned together, for as many micro-batches as the schedule has in flight there, and their modules are wrapped.
    Calls of ``schedule.step`` do not change.

    Parameters
    ----------
    schedule : torch.distributed.pipelining schedule
        ``ScheduleGPipe``, ``Schedule1F1B``, ``ScheduleInterleaved1F1B``, ``ScheduleLoopedBFS`` or a zero-bubble one
        (``ScheduleInterleavedZeroBubble``, ``ScheduleZBVZeroBubble``, ``ScheduleDualPipeV``), with a ``loss_fn``; its
        stages are made by ``PipelineStage(module, ...)``.
    inputs, labels
        What ``schedule.step`` is called with on this rank, the whole batch: inputs where the first stage is, and as
        ``labels`` its ``target`` where the last one is.
    budget : int, float, str or Budget
        What this rank may hold, or may allocate on top of what is resident; see :func:`planner.plan`. ``"60%"`` is of
        what this rank holds without recompute.
    return_outputs : bool
        As ``schedule.step`` is called: whether the rank of the last stage keeps the outputs of all micro-batches, and
        puts them together.
    training, search, target
        See :func:`planner.plan`; ``gradient_accumulation`` says whether gradients of earlier steps are there when
        ``schedule.step`` begins.

    Returns
    -------
    StagePlan
        What this rank does, its predicted peak, and the plan of each of its stages.

    Raises
    ------
    UsageError
        If an argument is wrong.
    RuntimeUnsupportedError
        For schedules that are not torch's, whose memory is not known, and stages with a ``dw_builder`` of their own.
    CaptureError, NoPlanFitsError
        If a stage cannot be captured as one graph, or no plan fits this rank.
    PlanMismatchError
        If ranks have different schedules.
    PlannerError
        If another rank failed, or went away.
    """
    options = Options.of({**locals(), "runtime": "graph"})
    check_solver(options.runtime.name, options.search.solver)
    options.budget.check()
    search = replace(options.search, compare=False, progress=options.search.progress or tell)
    options = replace(options, search=search)
    rank = RankOfPipeline.of(schedule)
    example = Inputs.of(inputs) if inputs is not None else Inputs((), {})
    for stage in rank.stages:
        unwrap(stage.submod)
    with entered(of_model(rank.stages[0].submod, example.args, example.kwargs)):
        made, planned = plan_rank(rank, example, labels, options, return_outputs=return_outputs)
    deferred = []
    for one in planned:
        later = None if one.options.deferred is None else LaterWeights()
        budget_of_stage = Budget(one.plan.budget_bytes)
        own = replace(one.options, budget=budget_of_stage, reused_plan=one.plan, deferred=later)
        running = runtimes.get(own.runtime.name).start(one.module, own, plan=one.plan, replan=False)
        install_planned_call(one.module, running)
        deferred.append(later)
    rank.give_weights_by(deferred)
    return made
