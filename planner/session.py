"""From a joint graph to a plan for it: lowering, costs, reuse of a plan that fits, solving.

Planning without running (``planner.api.plan``) and running (``planner.runtimes``) both come
through here, so both see the same graph.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import cost_models
from cost_models.measured import MeasuredCosts, Profile
from planner import workspace
from planner.capture import is_fake
from planner.costing import SECONDS_TO_MEASURE, Costing, cost_step
from planner.errors import PlanMismatchError, UsageError
from planner.graph import OperationCost, TrainingGraph
from planner.inputs import static_bytes
from planner.joint import JointGraph
from planner.lowering import LoweredGraph, lower
from planner.planning import Plan, PlanOrigin, Size, make_plan, make_problem, plan_from_solution
from planner.problem import Progress, Solution
from planner.schedule import Schedule
from planner.simulate import simulate

OF_THE_MODEL = ("parameters", "buffers", "inputs")
"""What is resident because of the model itself, whatever surrounds it."""

OPTIMIZER_STATE_COPIES = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""How many tensors of each parameter's size an optimizer keeps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a person asks of a plan.

    Parameters
    ----------
    budget, activation_budget : int, float or str, optional
        One of the two: what the whole device may hold, or what the step may allocate.
    solver : str
        Name of a solver; ``"auto"`` picks.
    time_limit_seconds : float
        Roughly when the solver stops improving.
    deterministic, seed
        See :class:`planner.effort.Effort`.
    device : str, optional
        Name in the table of devices; by default the kind of device that the model is on.
    cost_model : str
        Name of a cost model.
    profile : Profile, optional
        Costs that were recorded before.
    optimizer : str
        ``"none"``, ``"sgd"``, ``"momentum"``, ``"adam"`` or ``"adamw"``: whose state is resident.
    gradient_accumulation : bool
        Whether gradients of earlier backwards are resident when the step begins.
    resident_bytes : mapping of str to int
        What else is resident, by kind, in place of what the two above say: for taking over a plan.
    loss_bytes : int
        What a loss outside the captured graph needs on top of the outputs and their gradients.
    name : str
        Name of the model in reports.
    compare : bool
        Whether to simulate the baselines for the report.
    progress : callable, optional
        Told in short lines how it stands.
    """

    budget: Size | None = None
    activation_budget: Size | None = None
    solver: str = "auto"
    time_limit_seconds: float = 10.0
    deterministic: bool = False
    seed: int = 0
    device: str | None = None
    cost_model: str = "roofline"
    profile: Profile | None = None
    optimizer: str = "none"
    gradient_accumulation: bool = False
    resident_bytes: Mapping[str, int] | None = None
    loss_bytes: int = 0
    name: str = ""
    compare: bool = True
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_STATE_COPIES:
            raise UsageError(f"unknown optimizer {self.optimizer!r}: one of {', '.join(OPTIMIZER_STATE_COPIES)}")


def options_of(plan: Plan, **changes: Any) -> Options:
    """Give the options under which a plan was made, as far as they decide whether it fits elsewhere.

    Times do not, so nothing is measured again.
    """
    beside = {kind: size for kind, size in plan.static_bytes.items() if kind not in OF_THE_MODEL}
    made = Options(
        budget=plan.budget_bytes,
        device=plan.device or None,
        cost_model="roofline" if plan.cost_model == MeasuredCosts.name else plan.cost_model,
        resident_bytes=beside,
        name=plan.model,
        compare=False,
    )
    return replace(made, **changes)


@dataclass(frozen=True)
class PlannedStep:
    """A plan together with the graph that it was made for."""

    lowered: LoweredGraph
    costs: tuple[OperationCost, ...]
    plan: Plan
    schedule: Schedule


def lower_step(model: nn.Module, joint: JointGraph, options: Options) -> tuple[LoweredGraph, cost_models.DeviceSpec]:
    """Lower a captured step with everything that is resident around it."""
    spec = device_spec(model, options.device)
    alignment_bytes = spec.alignment_bytes
    resident = static_bytes(model, joint.inputs, alignment_bytes=alignment_bytes)
    resident |= _beside_the_model(model, options, alignment_bytes)
    lowered = lower(
        joint,
        alignment_bytes=alignment_bytes,
        static_bytes=resident,
        name=options.name or type(model).__name__,
        loss_workspace_bytes=options.loss_bytes,
    )
    return lowered, spec


def _beside_the_model(model: nn.Module, options: Options, alignment_bytes: int) -> dict[str, int]:
    if options.resident_bytes is not None:
        return dict(options.resident_bytes)
    trainable_bytes = sum(
        -(-p.numel() * p.element_size() // alignment_bytes) * alignment_bytes
        for p in model.parameters()
        if p.requires_grad
    )
    copies = OPTIMIZER_STATE_COPIES[options.optimizer]
    beside = {"gradients": trainable_bytes * options.gradient_accumulation, "optimizer": trainable_bytes * copies}
    return {kind: size_bytes for kind, size_bytes in beside.items() if size_bytes}


def device_spec(model: nn.Module, name: str | None) -> cost_models.DeviceSpec:
    """Give the figures of a named device, or of the one that the model is on."""
    if name is None:
        where = device_of(model)
        name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    try:
        return cost_models.device(name)
    except cost_models.UnknownNameError as error:
        raise UsageError(str(error)) from error


def device_of(model: nn.Module) -> torch.device:
    """Give the device of a model's first parameter or buffer; the CPU if it has none."""
    tensor = next(iter([*model.parameters(), *model.buffers()]), None)
    return torch.device("cpu") if tensor is None else tensor.device


def plan_step(
    model: nn.Module, joint: JointGraph, options: Options, *, reuse: Plan | None = None, must_match: bool = False
) -> PlannedStep:
    """Plan a captured step.

    Parameters
    ----------
    model : torch.nn.Module
    joint : JointGraph
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
    begun = time.perf_counter()
    lowered, spec = lower_step(model, joint, options)
    costing = cost(model, joint, lowered, spec, options)
    costs = costing.costs
    origin = PlanOrigin(
        fingerprint=fingerprint(model, lowered.graph, spec.name, joint.inputs),
        capture_seconds=time.perf_counter() - begun,
        cost_model=costing.cost_model,
        device=spec.name,
        torch_version=torch.__version__,
        warnings=costing.warnings,
    )
    if reuse is not None:
        if must_match:
            check_match(reuse, origin)
        taken_over = _take_over(lowered, costs, options, origin, reuse)
        if taken_over is not None:
            return taken_over
        if must_match:
            raise PlanMismatchError(
                "the plan's decisions break the budget on this graph: plan again, or pass replan=True"
            )
    plan = make_plan(
        lowered.graph,
        costs,
        budget=options.budget,
        activation_budget=options.activation_budget,
        solver=options.solver,
        time_limit_seconds=options.time_limit_seconds,
        deterministic=options.deterministic,
        seed=options.seed,
        origin=origin,
        progress=options.progress,
        compare=options.compare,
    )
    return PlannedStep(lowered, costs, plan, plan.schedule_for(lowered.graph))


def cost(
    model: nn.Module,
    joint: JointGraph,
    lowered: LoweredGraph,
    spec: cost_models.DeviceSpec,
    options: Options,
    *,
    time_limit_seconds: float = SECONDS_TO_MEASURE,
) -> Costing:
    """Find out what every operation costs, by asking the device where it is here."""
    is_here = options.device is None or spec == device_spec(model, None)
    return cost_step(
        lowered,
        spec,
        cost_model=options.cost_model,
        here=device_of(model) if is_here else None,
        inputs=input_shapes(model, joint.inputs),
        effort=workspace.TO_PLAN if is_fake(model) else workspace.TO_RUN,
        profile=options.profile,
        time_limit_seconds=time_limit_seconds,
        progress=options.progress,
    )


def input_shapes(model: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Give the shapes of what a step is called with, parameters and buffers left out."""
    own = {id(p) for p in [*model.parameters(), *model.buffers()]}
    return tuple(tuple(t.shape) for t in inputs if id(t) not in own)


def fingerprint(
    model: nn.Module, graph: TrainingGraph, device: str, inputs: Sequence[torch.Tensor]
) -> dict[str, str | int]:
    """Say what a plan is made for, so that it is not applied to something else."""
    digest = hashlib.sha256()
    for operation in graph.operations:
        sizes = [graph.values[v].size_bytes for v in operation.outputs]
        digest.update(f"{operation.key} {operation.inputs} {operation.outputs} {sizes}\n".encode())
    parameters = {id(p) for p in [*model.parameters(), *model.buffers()]}
    shapes = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in inputs if id(t) not in parameters]
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "inputs": "; ".join(shapes),
        "device": device,
        "torch": torch.__version__,
        "operations": len(graph.operations),
        "graph": digest.hexdigest()[:16],
    }


def check_match(plan: Plan, origin: PlanOrigin) -> None:
    """Refuse a plan of another graph.

    Raises
    ------
    PlanMismatchError
        Naming what differs.
    """
    theirs, ours = plan.fingerprint, origin.fingerprint
    if theirs.get("graph") == ours["graph"]:
        return
    keys = [key for key in ours if theirs.get(key) != ours[key]]
    differs = [f"{key} is {theirs.get(key)!r} in the plan and {ours[key]!r} here" for key in keys]
    raise PlanMismatchError(
        f"the plan was made for something else: {'; '.join(differs)}. Plan again, or pass replan=True"
    )


def _take_over(
    lowered: LoweredGraph, costs: tuple[OperationCost, ...], options: Options, origin: PlanOrigin, plan: Plan
) -> PlannedStep | None:
    """Carry a plan over to a graph whose operations have the same keys, if it keeps the budget there."""
    try:
        schedule = plan.schedule_for(lowered.graph)
    except PlanMismatchError:
        return None
    problem = make_problem(lowered.graph, costs, budget=options.budget, activation_budget=options.activation_budget)
    evaluation = simulate(lowered.graph, costs, schedule)
    unneeded = evaluation.recompute_seconds > 0 and problem.baseline.peak_bytes <= problem.budget_bytes
    if evaluation.peak_bytes > problem.budget_bytes or unneeded:
        return None
    same_graph = plan.fingerprint.get("graph") == origin.fingerprint["graph"]
    solution = Solution(
        solver=plan.solver if same_graph else f"{plan.solver} (reused)",
        schedule=schedule,
        peak_bytes=evaluation.peak_bytes,
        recompute_seconds=evaluation.recompute_seconds,
        lower_bound_seconds=min(plan.lower_bound_seconds, evaluation.recompute_seconds) if same_graph else 0.0,
    )
    taken = plan_from_solution(problem, solution, origin=origin, compare=options.compare)
    if same_graph and plan.cost_model != origin.cost_model:  # its times were measured, and still hold
        taken = replace(
            taken,
            cost_model=plan.cost_model,
            baseline_step_seconds=plan.baseline_step_seconds,
            recompute_seconds=plan.recompute_seconds,
            lower_bound_seconds=plan.lower_bound_seconds,
            status=plan.status,
        )
    return PlannedStep(lowered, costs, taken, schedule)
