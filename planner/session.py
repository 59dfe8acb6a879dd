"""From a joint graph to a plan for it: lowering, costs, reuse of a plan that fits, solving.

Planning without running (``planner.api.plan``) and running (``planner.runtimes``) both come
through here, so both see the same graph.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from cost_models.devices import DeviceSpec
from cost_models.measured import MeasuredCosts, Profile
from planner import devices, rounding, timings, workspace
from planner.capture import is_fake
from planner.checkpoints import NOT_OF_THE_STEP
from planner.costing import SECONDS_TO_MEASURE, Costing, cost_step
from planner.cuda_attention import Attention, attention_on
from planner.device_file import find as find_device
from planner.diagnose import checkpoint_rules, model_rules
from planner.diagnose.facts import module_facts, outside_bytes
from planner.diagnose.rules import examine
from planner.diagnose.subject import Subject
from planner.errors import PlanMismatchError
from planner.findings import Finding, Severity
from planner.gradient_sums import sum_in_place
from planner.graph import OperationCost
from planner.host import LEAST_BYTES
from planner.joint import JointGraph
from planner.layers import find_layers
from planner.local_graph import local_step
from planner.lowering import CPU_RANDOM_STATE_BYTES, LoweredGraph, lower
from planner.plan_match import assumes_the_same, check_match
from planner.planning import Plan, PlanOrigin, Size, make_problem
from planner.problem import Progress
from planner.provenance import kinds_of
from planner.resident import Blocks, surroundings
from planner.schedule import Schedule
from planner.slices import Chunk, slices_of
from planner.study_types import Study
from planner.surroundings import SHARDS, TENSOR_PARALLEL, LossMemory, Surroundings, as_planned
from planner.taking_over import take_over
from planner.torch_internals import outside_tracing
from planner.training import Training
from planner.units import is_share


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a person asks of a plan.

    Parameters
    ----------
    budget, activation_budget : int, float or str, optional
        One of the two: what the whole device may hold, or what the step may allocate.
    strategy : str, optional
        What an established system does, in place of what a solver would choose.
    solver : str
        Name of a solver; ``"auto"`` picks.
    time_limit_seconds : float
        Roughly when the solver stops improving.
    deterministic, seed
        See :class:`planner.effort.Effort`.
    device : str, optional
        Name in the table of devices, or a device file; by default the device that the model is on.
    cost_model : str
        Name of a cost model.
    profile : Profile, optional
        Costs that were recorded before.
    training : Training
        What surrounds the step.
    taken_over : Plan, optional
        Its surroundings are taken in place of what ``training`` says.
    loss : LossMemory, optional
        What a loss outside the captured graph takes; None if none is known.
    runtime : str
        Name of the runtime that is to carry the plan out.
    together : bool
        Whether all ranks of torch.distributed plan this step at once, and are to have one plan.
    name : str
        Name of the model in reports.
    compare : bool
        Whether to simulate the baselines for the report.
    progress : callable, optional
        Told in short lines how it stands.
    at_least_bytes : int
        What the whole device may hold even if the budget comes to less; see :meth:`after`.
    maximum_shapes : int
        How many sets of input sizes a runtime may have graphs for.
    offload : bool
        Whether values may wait in the host's memory.
    host_budget : int, float or str, optional
        What they may take of it; by default half of what this machine has.
    offload_at_least : int, float or str
        Values below this size stay on the device.
    offload_lossy : bool
        Whether values of float32 wait there rounded to bfloat16.
    chunk : int or str
        In how many slices to compute what makes the peak; 1 for none, ``"auto"`` for the planner to choose.
    """

    budget: Size | None = None
    activation_budget: Size | None = None
    strategy: str | None = None
    solver: str = "auto"
    time_limit_seconds: float = 10.0
    deterministic: bool = False
    seed: int = 0
    device: str | None = None
    cost_model: str = "roofline"
    profile: Profile | None = None
    training: Training = field(default_factory=Training)
    taken_over: Plan | None = None
    loss: LossMemory | None = None
    runtime: str = "graph"
    together: bool = False
    name: str = ""
    compare: bool = True
    progress: Progress | None = None
    at_least_bytes: int = 0
    maximum_shapes: int = 64
    offload: bool = False
    host_budget: Size | None = None
    offload_at_least: Size = LEAST_BYTES
    offload_lossy: bool = False
    chunk: Chunk = 1

    def after(self, plan: Plan) -> Options:
        """Give the options for other input sizes: what a percentage came to is not taken back for smaller ones."""
        if is_share(self.budget) or is_share(self.activation_budget):
            return replace(self, at_least_bytes=max(self.at_least_bytes, plan.budget_bytes))
        return self


def options_of(plan: Plan, **changes: Any) -> Options:
    """Give the options under which a plan was made, as far as they decide whether it fits elsewhere.

    Times do not, so nothing is measured again.
    """
    made = Options(
        budget=plan.budget_bytes,
        cost_model="roofline" if plan.cost_model == MeasuredCosts.name else plan.cost_model,
        taken_over=plan,
        runtime=plan.runtime,
        name=plan.model,
        compare=False,
        offload=plan.offloading is not None,
        host_budget=plan.offloading.host_budget_bytes if plan.offloading else None,
        offload_lossy=plan.offloading is not None and plan.offloading.lossy,
        offload_at_least=(plan.offloading and plan.offloading.least_bytes) or LEAST_BYTES,
        chunk=slices_of(plan.fingerprint),
    )
    return replace(made, **changes)


@dataclass(frozen=True)
class PlannedStep:
    """A plan together with the graph that it was made for."""

    lowered: LoweredGraph
    costs: tuple[OperationCost, ...]
    plan: Plan
    schedule: Schedule


@dataclass(frozen=True)
class LoweredStep:
    """A captured step with everything that is resident around it, on the device that the plan is for."""

    lowered: LoweredGraph
    spec: DeviceSpec
    surroundings: Surroundings
    facts: dict[str, str | int] = field(default_factory=dict)
    """What else a plan for this step is made for."""
    warnings: tuple[Finding, ...] = ()
    capture_seconds: float = 0.0
    stand_ins: Mapping[int, nn.Parameter] = field(default_factory=dict)
    """By storage, what the device has of parameters that several devices share."""


@timings.stage("lowering")
def lower_step(model: nn.Module, joint: JointGraph, options: Options) -> LoweredStep:
    """Lower a captured step, and count what surrounds it."""
    spec = device_spec(model, options.device)
    devices = options.training.tensor_parallel
    local = local_step(joint, devices)

    def blocks() -> Collection[str]:
        plain = lower(local.joint, alignment_bytes=spec.alignment_bytes, static_bytes={}, kinds=kinds_of(model))
        return find_layers(plain.graph).blocks

    around = surroundings_of(local.model(model), [*map(local.here, joint.inputs)], spec, options, blocks)
    lowered = lower(
        local.joint,
        alignment_bytes=spec.alignment_bytes,
        static_bytes=dict(around.static_bytes),
        name=options.name or type(model).__name__,
        loss=options.loss or LossMemory(),
        random_state_bytes=CPU_RANDOM_STATE_BYTES if spec.kind == "cpu" else 0,
        gradient_shards=around.gradient_shards,
        kinds=kinds_of(model),
    )
    facts: dict[str, str | int] = {TENSOR_PARALLEL: devices} if devices > 1 else {}
    return LoweredStep(rounding.marked(lowered), spec, around, facts, local.notes, stand_ins=local.stand_ins)


def lower_as_run(model: nn.Module, joint: JointGraph, options: Options) -> LoweredStep:
    """Lower a captured step as a runtime of whole graphs carries it out; the joint graph may be changed."""
    if not joint.functional and options.training.tensor_parallel == 1:
        sum_in_place(joint)
    return lower_step(model, joint, options)


def surroundings_of(
    model: nn.Module, inputs: Sequence[torch.Tensor], spec: DeviceSpec, options: Options, blocks: Blocks = tuple
) -> Surroundings:
    """Count what surrounds a step: as its options say, or as the plan that is taken over has it."""
    around = surroundings(model, inputs, spec, options.training, blocks)
    return around if options.taken_over is None else as_planned(around, options.taken_over)


def device_here(model: nn.Module, spec: DeviceSpec) -> torch.device | None:
    """Give the device that the model is on if it is the one that is planned for, so that it can be asked."""
    where = devices.of_model(model)
    return where if devices.is_here(spec, where) else None


def effort_for(model: nn.Module) -> workspace.Effort:
    """Say what trying kernels may take: those of a model that is about to run here may take what it takes."""
    return workspace.TO_PLAN if is_fake(model) else workspace.TO_RUN


def device_spec(model: nn.Module, name: str | None) -> DeviceSpec:
    """Give the figures of a named device, or of the one that the model is on."""
    return find_device(name) if name else devices.here(devices.of_model(model))


def attention_for(model: nn.Module, options: Options) -> Attention | None:
    """Give the attention that a captured step is to have: the GPU's, where that is not here to say so itself."""
    spec = device_spec(model, options.device)
    return attention_on(spec) if spec.kind == "cuda" and devices.of_model(model).type != "cuda" else None


def study_lowered(model: nn.Module, step: LoweredStep, options: Options) -> Study:
    """Cost a lowered step, and say where it comes from."""
    begun = time.perf_counter()
    costing = cost(model, step.lowered, step.spec, options)
    origin = PlanOrigin(
        fingerprint=fingerprint_of(model, step),
        capture_seconds=step.capture_seconds + time.perf_counter() - begun,
        cost_model=costing.cost_model,
        device=step.spec.name,
        torch_version=torch.__version__,
        runtime=options.runtime,
        warnings=(
            *costing.warnings,
            *step.warnings,
            *_assumed(step.lowered.joint),
            *problems_of(model, options, outside_bytes=outside_bytes(step.lowered.graph)),
        ),
    )
    return Study(
        graph=step.lowered.graph,
        costs=costing.costs,
        origin=origin,
        surroundings=step.surroundings,
        device=step.spec,
    )


def plan_lowered(
    model: nn.Module, step: LoweredStep, options: Options, *, reuse: Plan | None = None, must_match: bool = False
) -> PlannedStep:
    """Plan a lowered step.

    Parameters
    ----------
    model : torch.nn.Module
    step : LoweredStep
    options : Options
    reuse : Plan, optional
        A plan to take over if it belongs to this graph, or if its decisions fit it and keep the budget.
    must_match : bool
        Refuse instead of planning anew when ``reuse`` is of another model or of other shapes.

    Raises
    ------
    PlanMismatchError
        If ``must_match`` and the plan does not match, with what differs.
    InfeasibleBudgetError
        If no plan fits.
    """
    return plan_studied(step, study_lowered(model, step, options), options, reuse=reuse, must_match=must_match)


def plan_studied(
    step: LoweredStep, study: Study, options: Options, *, reuse: Plan | None = None, must_match: bool = False
) -> PlannedStep:
    """Plan a lowered step that has been costed; see :func:`plan_lowered`."""
    lowered, costs, origin = step.lowered, study.costs, study.origin
    if reuse is not None:
        if must_match:
            check_match(reuse, origin)
        problem = make_problem(
            lowered.graph,
            costs,
            budget=options.budget,
            activation_budget=options.activation_budget,
            at_least_bytes=options.at_least_bytes,
            host=study.host(options.host_budget, options.offload_at_least, lossy=options.offload_lossy)
            if options.offload
            else None,
        )
        taken_over = take_over(study, problem, reuse, compare=options.compare, asked_for=must_match)
        if taken_over is not None:
            return PlannedStep(lowered, costs, taken_over, taken_over.schedule_for(lowered.graph))
        if must_match and assumes_the_same(reuse, origin):
            raise PlanMismatchError(
                "the plan's decisions break the budget on this graph: plan again, or pass replan=True"
            )
    plan = study.plan(
        budget=options.budget,
        activation_budget=options.activation_budget,
        at_least_bytes=options.at_least_bytes,
        strategy=options.strategy,
        solver=options.solver,
        time_limit_seconds=options.time_limit_seconds,
        deterministic=options.deterministic,
        seed=options.seed,
        offload=options.offload,
        host_budget=options.host_budget,
        offload_at_least=options.offload_at_least,
        offload_lossy=options.offload_lossy,
        compare=options.compare,
        progress=options.progress,
    )
    return PlannedStep(lowered, costs, plan, plan.schedule_for(lowered.graph))


def _assumed(joint: JointGraph) -> Iterator[Finding]:
    if joint.assumes:
        yield Finding(
            rule="mask-left-out",
            severity=Severity.NOTE,
            evidence=f"masks are made from {', '.join(joint.assumes)} alone, and hide nothing but what comes later",
            cause="attention runs with a flag in place of its mask, as in eager",
            fix="nothing: every batch is checked, and one that needs the mask gets a plan of its own within the budget",
        )


def problems_of(
    model: nn.Module,
    options: Options,
    *,
    outside_bytes: int,
    returned_cache: bool = False,
    allowed: Collection[str] = (),
) -> Iterator[Finding]:
    """Say what is known to stand in the way without running the forward; ``planner.check`` looks closer.

    ``outside_bytes`` and ``returned_cache`` are those of :class:`~planner.diagnose.subject.Subject`; rules that are
    allowed to be broken are of what the runtime has no trouble with.
    """
    subject = Subject(
        modules=module_facts(model),
        returned_cache=returned_cache,
        outside_bytes=outside_bytes,
        counts_loss=options.loss is not None,
    )
    found = examine(subject, (*checkpoint_rules.RULES, *model_rules.RULES))
    return (finding for finding in found if finding.is_problem and finding.rule not in allowed)


@timings.stage("costing")
def cost(
    model: nn.Module,
    lowered: LoweredGraph,
    spec: DeviceSpec,
    options: Options,
    *,
    time_limit_seconds: float = SECONDS_TO_MEASURE,
) -> Costing:
    """Find out what every operation costs, by asking the device where it is here."""
    with outside_tracing():  # Inductor asks for its partition while tensors have no data
        return cost_step(
            lowered,
            spec,
            cost_model=options.cost_model,
            here=device_here(model, spec),
            inputs=input_shapes(model, lowered.joint.inputs),
            effort=effort_for(model),
            profile=options.profile,
            time_limit_seconds=time_limit_seconds,
            progress=options.progress,
        )


def input_shapes(model: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Give the shapes of what a step is called with, parameters and buffers left out."""
    own = {id(p) for p in [*model.parameters(), *model.buffers()]}
    return tuple(tuple(t.shape) for t in inputs if id(t) not in own)


def input_elements(model: nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """Count the elements of what a step is called with."""
    return sum(math.prod(shape) for shape in input_shapes(model, inputs))


def fingerprint_of(model: nn.Module, step: LoweredStep) -> dict[str, str | int]:
    """Say what a plan for a lowered step is made for."""
    shards = step.surroundings.gradient_shards
    spread: dict[str, str | int] = {SHARDS: shards} if shards > 1 else {}
    return {**fingerprint(model, step.lowered, step.spec.name), **spread, **step.facts}


def fingerprint(model: nn.Module, lowered: LoweredGraph, device: str) -> dict[str, str | int]:
    """Say what a plan is made for, so that it is not applied to something else."""
    graph, joint = lowered.fingerprinted or lowered.graph, lowered.joint
    digest = hashlib.sha256()
    operations = [operation for operation in graph.operations if operation.target not in NOT_OF_THE_STEP]
    for operation in operations:
        sizes = [graph.values[v].size_bytes for v in operation.outputs]
        digest.update(f"{operation.key} {operation.inputs} {operation.outputs} {sizes}\n".encode())
    parameters = {id(p) for p in [*model.parameters(), *model.buffers()]}
    shapes = [
        f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in joint.inputs if id(t) not in parameters
    ]
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "inputs": "; ".join(shapes),
        "device": device,
        "torch": torch.__version__,
        "assumes": ", ".join(joint.assumes),
        "operations": len(operations),
        "graph": digest.hexdigest()[:16],
    }
