"""Lower, cost and plan a captured step, or reuse a plan that fits it.

Planning alone (``planner.api.plan``) and running (``planner.runtimes``) both come through here, so both see the same
graph.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from cost_models.auto import AutoCosts
from cost_models.devices import DeviceSpec
from cost_models.measured import MeasuredCosts
from cost_models.roofline import RooflineCosts
from planner.analysis import eager_baseline
from planner.analysis.eager_baseline import eager_step
from planner.analysis.study import Study
from planner.capture.autograd_accumulation import sum_in_place
from planner.capture.cuda_attention import NEWEST, RULES
from planner.capture.in_place import may_overwrite
from planner.capture.inputs import Inputs, LossFunction
from planner.capture.joint import JointGraph, is_attention
from planner.capture.joint_capture import capture, loss_outputs
from planner.capture.lowering import LoweredGraph, lower, runs_after
from planner.capture.model_facts import is_fake, kinds_of, module_facts, of_model, outside_bytes, units_of
from planner.capture.parallel_events import Gradients
from planner.capture.target_device import TargetDevice
from planner.capture.torch_internals import VERSION, outside_tracing
from planner.common.options import (
    DROPPED,
    GROUPS,
    HELD,
    LEAST_BYTES,
    Budget,
    Offload,
    Runtime,
    Search,
    Target,
    Training,
    chunks_of,
    group,
)
from planner.common.units import Size, format_bytes
from planner.errors import CaptureError, PlanMismatchError
from planner.findings import model_rules
from planner.findings.finding import Finding, Severity, collapsed
from planner.findings.rules import Subject, examine
from planner.ir.builder import StepContext
from planner.ir.caches import in_base_order
from planner.ir.graph import OperationCost, Phase, TrainingGraph, chooses
from planner.ir.in_place import joined
from planner.ir.layers import find_layers
from planner.ir.policy import Policy
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.static_memory import OUTPUTS, SHARDS, LossMemory, StaticMemory
from planner.measure import loss
from planner.measure.costing import SECONDS_TO_MEASURE, Costing, captured_costs, cost_step
from planner.measure.devices import device_here, device_spec
from planner.measure.fusion import in_kernels, results_over_inputs
from planner.measure.optimizers import OptimizerMemory
from planner.measure.resident import Blocks, static_memory
from planner.plans.plan import Plan, PlanOrigin
from planner.plans.reuse import as_planned, assumes_the_same, check_match, take_over
from planner.session.fingerprint import fingerprint, outputs_assumed


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user asks of a plan, in groups, and what is known of the step before it is planned."""

    budget: Budget = Budget()
    search: Search = Search()
    offload: Offload = Offload(False)
    target: Target = Target()
    training: Training = Training()
    runtime: Runtime = Runtime("graph")
    policy: Policy | None = None
    name: str = ""
    reused_plan: Plan | None = None
    """A plan to apply: its static memory replaces that of ``training``."""
    optimizer: OptimizerMemory | None = None
    """What the optimizer that exists needs, if ``training`` names none."""
    loss: LossMemory | None = None
    """Memory of a loss outside the captured graph, if known."""
    eager: Study | CaptureError | None = None
    """The recorded eager step, or why it could not be recorded; None if it was not asked for."""
    gradients: Gradients = field(default_factory=Gradients)
    """How DDP handles the step's gradients; the tracer fills in ``found``."""
    plan_collectively: bool = False
    """Whether all ranks plan this step at once and must agree on one plan."""

    @classmethod
    def of(cls, asked: Mapping[str, Any], **more: Any) -> Options:
        """Return the options for the keywords of a public function, with plain words made into groups."""
        given = {name: group(kind, asked[name]) for name, kind in GROUPS.items() if name in asked and name != "budget"}
        if "budget" in asked:
            given["budget"] = Budget.of(asked["budget"])
        return cls(name=asked.get("name", ""), policy=asked.get("policy"), **given | more)

    def after(self, plan: Plan) -> Options:
        """Return the options for other input sizes: a percentage keeps the largest number of bytes it came to."""
        return replace(self, budget=self.budget.after(plan.budget_bytes))


def offload_of(plan: Plan, at_least: Size = LEAST_BYTES) -> Offload:
    """Return the offload options that a plan was made with."""
    made = plan.offloading
    if made is None:
        return Offload(False)
    return Offload(host_budget=made.host_budget_bytes, at_least=at_least)


def options_of(plan: Plan, loss: LossMemory | None) -> Options:
    """Return the options under which a plan was made, without measuring: times do not decide whether it fits."""
    return Options(
        budget=Budget(plan.budget_bytes),
        search=Search(compare=False),
        offload=offload_of(plan),
        target=Target(cost_model=RooflineCosts.name if plan.cost_model == MeasuredCosts.name else plan.cost_model),
        reused_plan=plan,
        runtime=Runtime(plan.runtime, chunk=chunks_of(plan.fingerprint)),
        name=plan.model,
        loss=loss,
    )


def with_loss(model: nn.Module, options: Options, loss_fn: LossFunction | None, inputs: Inputs) -> Options:
    """Return the options with the memory of a loss outside the model for these inputs."""
    if loss_fn is None:
        return options
    return replace(options, loss=loss.memory_of(model, inputs, loss_fn, options.target.device))


@dataclass(frozen=True)
class LoweredStep:
    """A captured step, lowered for a device, with the resident memory around it."""

    lowered: LoweredGraph
    spec: DeviceSpec
    static_memory: StaticMemory
    facts: dict[str, str | int] = field(default_factory=dict)
    """More entries of the plan's fingerprint."""
    warnings: tuple[Finding, ...] = ()
    capture_seconds: float = 0.0
    may_overwrite: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """For operations that can write over an input, the candidate values."""


@dataclass(frozen=True)
class PlannedStep:
    """A plan and the step that it was made for."""

    step: LoweredStep
    study: Study
    plan: Plan
    schedule: Schedule
    """In operations of the lowered graph, before in-place joins."""

    @classmethod
    def of(cls, step: LoweredStep, study: Study, plan: Plan) -> PlannedStep:
        """Take the plan of a study of a lowered step."""
        return cls(step, study, plan, study.ways.carried_out(plan.schedule_for(study.graph)))

    @property
    def lowered(self) -> LoweredGraph:
        """The captured graph, lowered."""
        return self.step.lowered

    @property
    def over(self) -> Mapping[int, int]:
        """For each operation that writes over an input, the value that it overwrites."""
        return self.study.ways.over

    @property
    def single_costs(self) -> tuple[OperationCost, ...]:
        """Costs of the lowered graph's operations, before in-place joins."""
        return self.study.ways.single_costs


def lower_step(model: nn.Module, joint: JointGraph, options: Options) -> LoweredStep:
    """Lower a captured step and count the resident memory around it."""
    spec = device_spec(of_model(model), options.target.device)

    def blocks() -> Collection[str]:
        plain = lower(joint, StepContext(alignment_bytes=spec.alignment_bytes, kinds=kinds_of(model)))
        return find_layers(plain.graph).blocks

    around = static_memory_of(model, joint.inputs, spec, options, blocks)
    lowered = lower(joint, context_of(model, spec, around, options))
    over: Mapping[int, Sequence[int]] = {}
    if not joint.functional:  # Inductor writes in place by itself, and orders its code itself
        lowered = replace(lowered, graph=replace(lowered.graph, runs_after=runs_after(lowered)))
        over = may_overwrite(lowered, on_cpu=spec.kind == "cpu")
    return LoweredStep(lowered, spec, around, capture_seconds=joint.capture_seconds, may_overwrite=over)


def context_of(model: nn.Module, spec: DeviceSpec, around: StaticMemory, options: Options) -> StepContext:
    """Return the context that a step is lowered in: device, loss, resident memory, gradients."""
    return StepContext(
        alignment_bytes=spec.alignment_bytes,
        static_bytes=around.static_bytes,
        name=options.name or type(model).__name__,
        kinds=kinds_of(model),
        loss=options.loss or LossMemory(),
        on_cpu=spec.kind == "cpu",
        gradient_shards=around.gradient_shards,
        finds_gradients=options.training.gradient_accumulation,
        outputs=outputs_of(options),
    )


def outputs_of(options: Options) -> str:
    """Return what a step assumes of its outputs: what the plan that is reused does, if there is one."""
    if options.reused_plan is not None:
        return str(options.reused_plan.fingerprint.get(OUTPUTS, HELD))
    return options.training.outputs


def notes_on(graph: TrainingGraph) -> Iterator[Finding]:
    """Say which bytes of outputs are taken to go before the backward, and what is never recomputed."""
    if chosen := [o.key for o in graph.operations if o.phase is Phase.FORWARD and chooses(o.target)]:
        yield Finding(
            rule="choices-run-once",
            severity=Severity.NOTE,
            evidence=f"operations that choose by value (a router) are not recomputed: {collapsed(chosen)}",
            cause="with other last bits it could choose differently, and gradients would be those of other experts",
            fix="nothing",
        )
    if outputs_assumed(graph) == DROPPED:
        dropped_bytes = sum(v.size_bytes for v in graph.values if v.kind == "output" and not v.retained)
        yield Finding(
            rule="outputs-dropped",
            severity=Severity.NOTE,
            evidence=f"{format_bytes(dropped_bytes)} of outputs are counted until there is a loss, and not after it",
            cause="the model returns its loss, and most loops drop all else that it returns before the backward",
            fix="nothing; if your loop holds the outputs, pass Training(outputs='held') or --outputs held",
        )


def lower_as_run(model: nn.Module, joint: JointGraph, options: Options) -> LoweredStep:
    """Lower a captured step as runtimes of whole graphs run it; the joint graph may be changed."""
    if not joint.functional:
        sum_in_place(joint)
    return lower_step(model, joint, options)


def static_memory_of(
    model: nn.Module, inputs: Sequence[torch.Tensor], spec: DeviceSpec, options: Options, blocks: Blocks = tuple
) -> StaticMemory:
    """Count the resident memory around a step, by its options or by the plan that is reused."""
    around = static_memory(model, inputs, spec, options.training, blocks, options.optimizer)
    return around if options.reused_plan is None else as_planned(around, options.reused_plan)


def captured(model: nn.Module, inputs: Inputs, options: Options) -> JointGraph:
    """Capture a step for the target device; of a sharded model only ``forward``, since hooks run around it."""
    options.search.tell("capturing forward and backward")
    choose_outputs = partial(loss_outputs, loss=options.loss)
    implementation = model.forward if units_of(model) else None
    elsewhere = elsewhere_for(model, options)
    return capture(model, inputs, implementation=implementation, elsewhere=elsewhere, choose_outputs=choose_outputs)


def elsewhere_for(model: nn.Module, options: Options) -> TargetDevice | None:
    """Return the GPU that a step is captured for if it is not here, so that its kernels must be chosen by rules."""
    spec = device_spec(of_model(model), options.target.device)
    return TargetDevice(spec) if spec.kind == "cuda" and of_model(model).type != "cuda" else None


def study_lowered(model: nn.Module, step: LoweredStep, options: Options) -> Study:
    """Cost a lowered step and make a study of it."""
    begun = time.perf_counter()
    costing = cost(model, step.lowered, step.spec, options)
    costs = costing.costs
    # Inductor writes kernels, and in place by itself.
    is_compiled = step.lowered.is_compiled
    in_place = in_kernels(step.lowered) if is_compiled else joined(step.lowered.graph, step.may_overwrite, costs)
    if not (is_compiled or is_fake(model) or options.target.profile):
        here = device_here(of_model(model), step.spec)
        costs = captured_costs(step.lowered, costing, in_place.over, here, len(list(model.parameters())))
    joined_costs = in_base_order(in_place.graph, in_place.costs(costs))
    if is_compiled:
        joined_costs = results_over_inputs(step.lowered, in_place, joined_costs)
    single = Problem(graph=step.lowered.graph, costs=costs, budget_bytes=0)
    planned = Problem(graph=in_place.graph, costs=joined_costs, budget_bytes=0)
    return Study(
        graph=planned.graph,
        costs=planned.costs,
        in_place=replace(in_place, single_costs=costs),
        origin=origin_of(
            costing,
            step.spec,
            fingerprint=fingerprint_of(model, step),
            capture_seconds=step.capture_seconds + time.perf_counter() - begun,
            runtime=options.runtime.name,
            eager=eager_step(options.eager),
            warnings=(
                *costing.warnings,
                *step.warnings,
                *eager_baseline.findings(single, planned, options.eager),
                *_assumptions(step.lowered.joint),
                *notes_on(step.lowered.graph),
                *problems_of(model, options, outside_bytes=outside_bytes(step.lowered.graph)),
            ),
        ),
        # Blocks are those of the code, and judged there.
        static_memory=replace(step.static_memory, has_caching_allocator=False) if is_compiled else step.static_memory,
        device=step.spec,
    )


def origin_of(costing: Costing, spec: DeviceSpec, **of_step: Any) -> PlanOrigin:
    """Return the origin of a costed step, for its plans."""
    return PlanOrigin(cost_model=costing.cost_model, device=spec.name, torch_version=torch.__version__, **of_step)


def plan_study(study: Study, options: Options, *, reuse: Plan | None = None, must_match: bool = False) -> Plan:
    """Plan a costed step, or reuse a plan that was made for it or fits it within the budget.

    With ``must_match`` a plan of another model or other shapes raises PlanMismatchError, which says what differs;
    otherwise the step is planned again.
    """
    if reuse is not None:
        if must_match:
            check_match(reuse, study.origin, varies=study.varies)
        reused_plan = carried_over(study, options, reuse, asked_for=must_match)
        if reused_plan is not None:
            return reused_plan
        # Another batch may need more, or have a graph of its own; the budget is what counts.
        if must_match and not study.varies and assumes_the_same(reuse, study.origin):
            raise PlanMismatchError(
                "the plan's decisions break the budget on this step: plan again, or pass Budget(plan=plan, replan=True)"
            )
    return study.plan(options.budget, search=options.search, offload=options.offload, policy=options.policy)


def plan_lowered(
    model: nn.Module, step: LoweredStep, options: Options, *, study: Study | None = None, **known: Any
) -> PlannedStep:
    """Plan a lowered step, whose study may exist already; ``known`` is for :func:`plan_study`."""
    study = study or study_lowered(model, step, options)
    try:
        plan = plan_study(study, options, **known)
    except PlanMismatchError:
        if not step.may_overwrite:
            raise
        # A plan that was made before operations wrote in place may need them one by one.
        study = study_lowered(model, replace(step, may_overwrite={}), options)
        plan = plan_study(study, options, **known)
    return PlannedStep.of(step, study, plan)


def _assumptions(joint: JointGraph) -> Iterator[Finding]:
    if joint.branches:
        yield Finding(
            rule="branches-taken",
            severity=Severity.NOTE,
            evidence=", ".join(dict.fromkeys(joint.branches)),
            cause="the values of inputs decide what is run, and the plan is for the branches that these take",
            fix="nothing: every call is checked, and one that takes other branches gets a plan of its own",
        )
    if joint.elsewhere and VERSION not in RULES and any(map(is_attention, joint.graph.nodes)):
        yield Finding(
            rule="attention-of-another-version",
            severity=Severity.NOTE,
            evidence=f"torch {torch.__version__} chooses attention kernels by rules that are not known here",
            cause=f"those of torch {'.'.join(map(str, NEWEST))} were taken for a device that is not here",
            fix="plan on the device, where torch chooses by itself",
        )


def problems_of(
    model: nn.Module, options: Options, outside_bytes: int, returned_cache: bool = False, allowed: Collection[str] = ()
) -> Iterator[Finding]:
    """Yield the problems that can be found without running the forward; ``planner.check`` finds more."""
    subject = Subject(
        modules=module_facts(model),
        returned_cache=returned_cache,
        outside_bytes=outside_bytes,
        counts_loss=options.loss is not None,
    )
    found = examine(subject, model_rules.RULES)
    return (finding for finding in found if finding.is_problem and finding.rule not in allowed)


def cost(
    model: nn.Module,
    lowered: LoweredGraph,
    spec: DeviceSpec,
    options: Options,
    *,
    time_limit_seconds: float = SECONDS_TO_MEASURE,
) -> Costing:
    """Find out what every operation costs; see :func:`planner.measure.costing.cost_step`.

    Deterministic and reused plans measure nothing.
    """
    target = options.target
    if options.search.deterministic or options.reused_plan is not None:
        target = replace(target, cost_model=RooflineCosts.name) if target.cost_model == AutoCosts.name else target
    with outside_tracing():  # Inductor asks for its partition while tensors have no data
        return cost_step(
            lowered,
            spec,
            target,
            here=device_here(of_model(model), spec),
            is_fake=is_fake(model),
            inputs=tuple(tuple(tensor.shape) for tensor in called_with(model, lowered.joint)),
            time_limit_seconds=time_limit_seconds,
            progress=options.search.progress,
        )


def carried_over(study: Study, options: Options, plan: Plan, **wanted: bool) -> Plan | None:
    """Carry a plan over to a costed step; see :func:`planner.plans.reuse.take_over`."""
    host = study.host_for(options.offload, options.search)
    return take_over(
        study.posed(options.budget, host),
        plan,
        origin=study.origin,
        around=study.static_memory,
        compare=options.search.compare,
        **wanted,
    )


def fingerprint_of(model: nn.Module, step: LoweredStep) -> dict[str, str | int]:
    """Return the fingerprint of a lowered step."""
    shards = step.static_memory.gradient_shards
    spread: dict[str, str | int] = {SHARDS: shards} if shards > 1 else {}
    return {**fingerprint_of_graph(model, step.lowered, step.spec), **spread, **step.facts}


def fingerprint_of_graph(model: nn.Module, lowered: LoweredGraph, spec: DeviceSpec) -> dict[str, str | int]:
    """Return the fingerprint of a lowered graph."""
    return fingerprint(type(model), model.parameters(), called_with(model, lowered.joint), lowered, spec.name)


def called_with(model: nn.Module, joint: JointGraph) -> list[torch.Tensor]:
    """Return a step's inputs without parameters and buffers."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [tensor for tensor in joint.inputs if id(tensor) not in own]
