"""Plan and wrap the stages of one rank of a pipeline that runs: sizes from rank to rank, then each rank for itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
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
from planner.capture.inputs import Inputs, alike, check_model, check_plannable
from planner.capture.joint_capture import run_without_data
from planner.capture.lowering import LoweredGraph
from planner.capture.model_facts import is_sharded, of_model, shards_of, units_of, unplanned_sharding, whole
from planner.capture.planned_call import install_planned_call
from planner.capture.sharding import ROOT, Unit, resident
from planner.capture.torch_internals import entered
from planner.common.options import Budget, Search, Target, Training
from planner.common.units import Size, round_up
from planner.errors import UsageError
from planner.extras.pipelines.devices import Device
from planner.extras.pipelines.pipelining_internals import RankOfPipeline
from planner.extras.pipelines.plan import StagePlan
from planner.extras.pipelines.schedules import Boundary, left_by, loads
from planner.extras.pipelines.stages import Stage, whole_stage
from planner.ir.graph import TrainingGraph
from planner.ir.static_memory import LossMemory, LossPasses, StaticMemory
from planner.measure import loss
from planner.measure.devices import device_spec
from planner.measure.resident import static_memory
from planner.plans.plan import Plan
from planner.report.progress import tell
from planner.session.rank_consensus import check_alike, made_by_all
from planner.session.step import Options, captured, lower_as_run, study_lowered

SHARES = "shares of gradients"

RECEIVED = "received gradients"
"""Kind of the buffers that gradients arrive in, one for each micro-batch."""


_Sizes = tuple[Inputs, list[torch.Tensor]]
"""What a stage is given for one micro-batch, and what it gives."""


@dataclass(frozen=True)
class _Captured:
    stage: Any
    inputs: Inputs
    outputs: Sequence[torch.Tensor]
    options: Options
    study: Study
    part: Stage
    boundary: Boundary


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
    unit = units[0]
    default = Unit(parameters=(), stays=True, copies=unit.copies)
    if replace(unit, modules=(), parameters=(), finds=frozenset()) != default:
        return "with settings of its own. Leave resharding, offload and sending as they are"
    if any(p.item_bytes != p.share_item_bytes or p.spread_item_bytes != p.item_bytes for p in unit.parameters):
        return "in mixed precision"
    return unplanned_sharding(module, (), None) or ""


def _sizes(rank: RankOfPipeline, example: Inputs) -> list[_Sizes]:
    """Return what each stage of this rank is given for one micro-batch, and what it gives: found stage after stage.

    What goes from stage to stage is told by tensors without data, on the meta device.
    """
    found: dict[int, _Sizes] = {}
    own = {stage.stage_index: stage for stage in rank.stages}

    def run(index: int, given: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        if index not in own:
            return None
        args, kwargs = rank.split(example.args, example.kwargs)
        received = tuple(alike(tensor, own[index].device) for tensor in given)
        inputs = Inputs(args if index == 0 else received, kwargs)
        if not inputs.tensors():
            raise UsageError("the first stage is on this rank: give example inputs, as schedule.step is called with")
        module = own[index].submod
        with whole(module):
            check_plannable(module, inputs)
            with run_without_data(module, inputs) as (_, outputs, _):
                pass
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        if other := next((output for output in outputs if not isinstance(output, torch.Tensor)), None):
            raise UsageError(f"a stage must return tensors, not {type(other).__name__}: the next stage receives them")
        found[index] = inputs, [alike(output, "meta") for output in outputs]
        return found[index][1]

    given: list[torch.Tensor] = []
    for index in range(rank.stages[0].num_stages):
        made = made_by_all(partial(run, index, given), f"ran stage {index} without data", rank.group)
        given = next(tensors for tensors in made if tensors is not None)
    return [found[stage.stage_index] for stage in rank.stages]


class _Rank:
    """Captures the stages of one rank, and plans them as one device."""

    def __init__(
        self, rank: RankOfPipeline, sizes: Sequence[_Sizes], target: Any, return_outputs: bool, options: Options
    ) -> None:
        self.rank, self.target, self.options, self.return_outputs = rank, target, options, return_outputs
        self.ranks = shards_of(rank.stages[0].submod)
        self.spec = device_spec(of_model(rank.stages[0].submod), options.target.device)
        self.unit = next((unit for stage in rank.stages for unit in units_of(stage.submod)), None)
        """What a sharded stage gathers for all micro-batches."""
        self.stages = []
        for stage, size in zip(rank.stages, sizes, strict=True):
            with whole(stage.submod):
                self.stages.append(self._captured(stage, *size))

    def planned(self) -> tuple[StagePlan, list[_Captured]]:
        """Plan all stages under the rank's budget; NoPlanFitsError if none was found."""
        rank, stages = self.rank, self.stages
        left = left_by(rank.order, [stage.boundary for stage in stages], warm_up=rank.warm_up)
        end_bytes = left[-1] + self._merged_bytes()
        if self.unit is not None:
            left, end_bytes = self._gathered(self.unit, left)
        parts, held = [stage.part for stage in stages], loads(rank.order, len(stages), left[:-1])
        device = Device(rank.stages[0].group_rank, parts, self._around(), held, end_bytes)
        budget_bytes = self.options.budget.in_bytes(device.keep_all.peak_bytes, device.static_bytes)
        made = device.planned(budget_bytes, self.options.search, [stage.study.origin for stage in stages])
        if made is None:
            raise device.no_plan_fits(budget_bytes)
        return made, stages

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

    def _captured(self, stage: Any, inputs: Inputs, outputs: Sequence[torch.Tensor]) -> _Captured:
        module, begun = stage.submod, time.perf_counter()
        options, taken = self._with_loss(stage, inputs)
        step = lower_as_run(module, captured(module, inputs, options), options)
        study = study_lowered(module, replace(step, capture_seconds=time.perf_counter() - begun), options)
        assert study.in_place is not None
        trained, sent_back = _gradients(module, step.lowered)
        here = {value: index for index, value in enumerate(study.in_place.values)}
        at_turn = study.graph.operations[study.graph.loss_index]
        part = whole_stage(
            study.graph,
            study.costs,
            gradient_bytes=sum(self.aligned(parameter.nbytes) for parameter in trained),
            input_gradients=[here[value] for value in sent_back],
            received=[v for v in at_turn.outputs if study.graph.values[v].kind == "tangent"],
            loss=taken,
        )
        boundary = self._boundary(stage, inputs, study.graph, taken)
        return _Captured(stage, inputs, outputs, options, study, part, boundary)

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
        returned_bytes = sum(self.aligned(t.nbytes) for t in inputs.args if t.requires_grad) * (not stage.is_first)
        if taken is None:
            return Boundary(sent_bytes=made_bytes, returned_bytes=returned_bytes)
        output_bytes = made_bytes * (not self.return_outputs)
        kept_bytes = made_bytes - output_bytes + taken.held_bytes
        return Boundary(returned_bytes=returned_bytes, output_bytes=output_bytes, kept_bytes=kept_bytes)

    def _around(self) -> StaticMemory:
        """Count what is resident: modules, what every micro-batch is given, and buffers for gradients to arrive in."""
        around = self._resident()
        count = self.rank.micro_batches
        given_bytes = received_bytes = 0
        for one in self.stages:
            given_bytes += count * sum(self.aligned(tensor.nbytes) for tensor in one.inputs.tensors())
            if not one.stage.is_last:
                received_bytes += count * self._bytes_of(tensor for tensor in one.outputs if tensor.requires_grad)
            elif isinstance(self.target, torch.Tensor):
                given_bytes += self.aligned(self.target.nbytes)
        beside = {"inputs": given_bytes} | ({RECEIVED: received_bytes} if received_bytes else {})
        return replace(around, static_bytes={**around.static_bytes, **beside})

    def _resident(self) -> StaticMemory:
        """Count the modules, or this rank's shares of them."""
        modules = [one.stage.submod for one in self.stages]
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
        last = (one.outputs for one in self.stages if one.stage.is_last)
        return self.return_outputs * self.rank.micro_batches * sum(map(self._bytes_of, last))

    def _bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        return sum(self.aligned(tensor.untyped_storage().nbytes()) for tensor in tensors)

    def aligned(self, size_bytes: int) -> int:
        """Round a size up as the allocator does."""
        return round_up(size_bytes, self.spec.alignment_bytes)


def _gradients(module: nn.Module, lowered: LoweredGraph) -> tuple[list[torch.Tensor], set[int]]:
    """Return the module's own tensors that get a gradient, and the values that are gradients of what it is given."""
    own = {id(parameter) for parameter in module.parameters()}
    joint = lowered.joint
    pairs = [pair for pair in zip(joint.inputs, joint.outputs[1], strict=True) if isinstance(pair[1], fx.Node)]
    nodes = {gradient for tensor, gradient in pairs if id(tensor) not in own}
    copies = {value for value, node in enumerate(lowered.value_nodes) if node in nodes}
    sent = copies.union(*(lowered.storage_of[node] for node in nodes))
    return [tensor for tensor, _ in pairs if id(tensor) in own], sent


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
        ``ScheduleGPipe``, ``Schedule1F1B``, ``ScheduleInterleaved1F1B`` or ``ScheduleLoopedBFS``, with a ``loss_fn``;
        its stages are made by ``PipelineStage(module, ...)``.
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
        For other schedules: zero bubbles cannot be filled, and what a schedule of your own holds is not known.
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
        facts = made_by_all(lambda: _checked(rank), "checked its stages", rank.group)
        check_alike(facts, "pipeline", "All ranks must make the same schedule, with as many micro-batches")
        sizes, planned = _sizes(rank, example), list[tuple[StagePlan, list[_Captured]]]()

        def plan() -> None:
            planned.append(_Rank(rank, sizes, labels, return_outputs, options).planned())

        made_by_all(plan, "planned its stages", rank.group)
    made, stages = planned[0]
    for captured_stage, plan_of_it in zip(stages, made.plans, strict=True):
        _run_planned(captured_stage, plan_of_it)
    return made


def _run_planned(stage: _Captured, plan: Plan) -> None:
    """Make a stage's module run its plan."""
    # The buffers that gradients arrive in are the rank's: to the module they are its own.
    resident = {kind: size_bytes for kind, size_bytes in plan.static_bytes.items() if kind != RECEIVED}
    plan = replace(plan, static_bytes=resident)
    options = replace(stage.options, is_stage=True, budget=Budget(plan.budget_bytes), reused_plan=plan)
    running = runtimes.get(options.runtime.name).start(stage.stage.submod, options, plan=plan, replan=False)
    install_planned_call(stage.stage.submod, running)
