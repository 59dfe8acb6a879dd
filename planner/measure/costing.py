"""Cost of each operation of a step: by a roofline, by running it here, or by a recorded profile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch

import cost_models
from cost_models.auto import AutoCosts
from cost_models.base import OperationCost
from cost_models.devices import DeviceSpec
from cost_models.measured import MeasuredCosts, Profile, filled
from cost_models.roofline import RooflineCosts
from planner.capture.lowering import LoweredGraph
from planner.common.options import Target
from planner.errors import ProfileMismatchError, UsageError
from planner.findings.finding import Finding, collapsed
from planner.ir.caches import in_base_order
from planner.ir.checkpoints import BOOKKEEPING, END, Region
from planner.ir.graph import TrainingGraph
from planner.ir.problem import Progress
from planner.measure import cuda_workspace, profiling, runs, workspace
from planner.measure.fusion import fused_costs, written_by_inductor, yardstick_of
from planner.measure.workspace import Tried

SECONDS_TO_MEASURE = 60.0
"""How long measuring a step may take; what is left then costs what the roofline says."""

SECONDS_FOR_EACH_OPERATION = 3e-3
"""How long measuring may take where nobody asked for it, for each operation of the step."""


_EAGER_CALL, _PARAMETER, _CAPTURED_STEP = 8.5, 36, 1200
"""What the host does in a step on a CPU beside the kernels, in calls of a small operator: for each operator that eager
calls, what its modules and autograd take beyond generated code; for each parameter, Dynamo's guard and AOTAutograd's
wrapper; for each captured step. A HiFi-GAN of 156 parameters and few views takes 2 points longer captured than its
kernels say, a Bamba of many views 4 less."""

_AGAIN, _REGION, _PART, _DISPATCHED = 25, 1200, 60, 28
"""The same of a checkpoint: for each operator of its second run, hooks for what it saves; for each region, and each
module in it, whose settings and random states are put back; for each operator of both runs where results are kept, the
mode that sees all. A Swin with every layer checkpointed takes 50% longer, of which kernels are 28 points."""


@dataclass(frozen=True)
class Costing:
    """Costs of a step's operations, and warnings on them."""

    costs: tuple[OperationCost, ...]
    cost_model: str
    """Where they come from, for the report."""
    profile: Profile | None = None
    """What was measured, here or elsewhere."""
    warnings: tuple[Finding, ...] = ()


def cost_step(
    lowered: LoweredGraph,
    spec: DeviceSpec,
    target: Target,
    *,
    here: torch.device | None,
    is_fake: bool,
    inputs: tuple[tuple[int, ...], ...],
    time_limit_seconds: float,
    progress: Progress | None,
) -> Costing:
    """Cost every operation on the plan's device, by measuring if that is present.

    ``here`` is that device if the model is on it, whose tensors may be fake. ``inputs`` are the shapes of what the step
    is called with, and the limit is for measuring. A profile that was recorded before makes the cost model
    ``"measured"``; ProfileMismatchError if it is of another step, device or version. UsageError if there is no such
    cost model, or the device is not here to be measured. ``"auto"`` measures for a moment if model and device are here,
    the costliest operations first.
    """
    graph, cost_model, profile = lowered.graph, target.cost_model, target.profile
    own = profile or cost_model == MeasuredCosts.name
    estimates = operation_costs(graph, spec, RooflineCosts.name if own else cost_model)
    written = written_by_inductor(lowered)
    yardstick = yardstick_of(lowered, written)
    effort = workspace.effort_for(is_fake=is_fake)
    tried = workspace.measure(lowered, estimates, here, effort) if here is not None else {}
    seen = _workspace_bytes(lowered, spec, here, tried)
    costs = _with_workspace(estimates, seen)
    if profile is not None:
        costing = _by_profile(lowered, spec, costs, profile, inputs)
    elif cost_model == MeasuredCosts.name:
        if here is None:
            raise UsageError(
                f"{spec.name} cannot be measured here: plan for the device that the model is on, or give a profile "
                "that was recorded on one"
            )
        outcome = profiling.measure(lowered, costs, here, time_limit_seconds=time_limit_seconds, progress=progress)
        made = profiling.profile_of(lowered, outcome, model=graph.name, device=spec.name, inputs=inputs)
        known = _without_loss(graph, filled(graph.operations, costs, made))
        costing = Costing(known, cost_model, made, tuple(_warnings(outcome)))
    elif cost_model == AutoCosts.name and here is not None and not is_fake:
        costing = _measured_for_a_moment(_without_signatures(lowered, written - {yardstick}), costs, tried, here)
    else:
        costing = Costing(costs, RooflineCosts.name if cost_model == AutoCosts.name else cost_model)
    if here is not None:  # what was seen holds, whatever a profile says that was perhaps made with less effort
        costing = replace(costing, costs=_with_workspace(costing.costs, seen))
    scale = 1.0 if yardstick is None else costing.costs[yardstick].seconds / estimates[yardstick].seconds
    costs = fused_costs(lowered, costing.costs, written, spec, scale)
    # A random operation that runs again puts the generator's state by meanwhile. Its first run needs none of it;
    # telling the two apart is not worth five kilobytes.
    states = {i: costs[i].workspace_bytes + o.state_bytes for i, o in enumerate(graph.operations) if o.state_bytes}
    notes = _unseen(graph, seen) if here is not None else _not_here(spec) if profile is None else ()
    small = {index: one.small_bytes for index, one in tried.items() if one is not None}
    costs = _with_workspace(costs, states)
    costs = tuple(replace(cost, small_bytes=small.get(index, 0)) for index, cost in enumerate(costs))
    return replace(costing, costs=costs, warnings=(*notes, *costing.warnings))


def _workspace_bytes(
    lowered: LoweredGraph, spec: DeviceSpec, here: torch.device | None, tried: Mapping[int, Tried | None]
) -> dict[int, int | None]:
    """Return the workspace of operations by index: what was tried, else on CUDA an allowance; None if not known."""
    seen = {index: None if one is None else one.workspace_bytes for index, one in tried.items()}
    if spec.kind == "cuda":  # some do not run alone, but what they take is known
        alone = {i: node for i, node in enumerate(lowered.operation_nodes) if node and i not in seen}
        allowed = {i: cuda_workspace.allowance_bytes(node, spec) for i, node in alone.items()}
        seen |= {index: size_bytes for index, size_bytes in allowed.items() if size_bytes or here is None}
    return seen


def operation_costs(graph: TrainingGraph, spec: DeviceSpec, cost_model: str) -> tuple[OperationCost, ...]:
    """Ask a cost model that needs nothing but the graph."""
    try:
        factory = cost_models.get(cost_model)
    except cost_models.UnknownNameError as error:
        raise UsageError(str(error)) from error
    return _without_loss(graph, factory(spec).costs(graph.operations))


def _without_signatures(lowered: LoweredGraph, which: Collection[int]) -> LoweredGraph:
    """Return a graph some of whose operations are not run alone."""
    operations = enumerate(lowered.graph.operations)
    kept = tuple(replace(operation, signature="") if i in which else operation for i, operation in operations)
    return replace(lowered, graph=replace(lowered.graph, operations=kept)) if which else lowered


def _with_workspace(costs: Sequence[OperationCost], known: Mapping[int, int | None]) -> tuple[OperationCost, ...]:
    """Return costs with the workspace that is known of operations, by index."""
    return tuple(
        cost if (workspace_bytes := known.get(index)) is None else replace(cost, workspace_bytes=workspace_bytes)
        for index, cost in enumerate(costs)
    )


def _unseen(graph: TrainingGraph, seen: Mapping[int, int | None]) -> Iterator[Finding]:
    unseen = [graph.operations[index] for index, workspace_bytes in seen.items() if workspace_bytes is None]
    if unseen:
        yield Finding(
            rule="workspace-unseen",
            evidence=f"{len(unseen)} of {len(seen)} operations were too large to be tried alone, or could not be: "
            f"{collapsed([operation.target for operation in unseen])}",
            cause="their workspace counts as zero, so the peak may be higher",
            fix="verify the plan: on a real model every operation is tried",
        )


def _not_here(spec: DeviceSpec) -> Iterator[Finding]:
    if spec.kind == "cuda":
        yield Finding(
            rule="device-not-here",
            evidence=f"{spec.name} is not here",
            cause="attention kernels are those that torch would choose there, and "
            "the workspace of convolutions, of attention and of matrix libraries is an allowance",
            fix="profile on such a device, or verify there",
        )


def _without_loss(graph: TrainingGraph, costs: Sequence[OperationCost]) -> tuple[OperationCost, ...]:
    """Set the cost of the loss outside the graph to zero: no plan changes it."""
    return tuple(OperationCost(seconds=0.0) if index == graph.loss_index else cost for index, cost in enumerate(costs))


def _measured_for_a_moment(
    lowered: LoweredGraph, estimates: Sequence[OperationCost], tried: Mapping[int, Tried | None], here: torch.device
) -> Costing:
    """Take what the first run of each operation took, but time short ones, of which that says little, for a moment.

    What did not run alone costs what the roofline says, scaled as it was wrong for the others.
    """
    operations = lowered.graph.operations
    first = {operations[index].signature: one.run for index, one in tried.items() if one is not None}
    rough = tuple(
        replace(estimate, seconds=first[operation.signature].without_faults)
        if operation.signature in first
        else estimate
        for operation, estimate in zip(operations, estimates, strict=True)
    )
    outcome = profiling.measure(
        lowered,
        rough,
        here,
        time_limit_seconds=SECONDS_FOR_EACH_OPERATION * len(operations),
        trials=profiling.QUICK,
        first_runs=first,
    )
    took = outcome.measurements
    known = [index for index, operation in enumerate(operations) if operation.signature in took]
    if not known:
        return Costing(tuple(estimates), RooflineCosts.name)
    seconds = sum(took[operations[index].signature].seconds for index in known)
    scale = seconds / sum(estimates[index].seconds for index in known)
    costs = [
        replace(took[operation.signature].cost, workspace_bytes=estimate.workspace_bytes)
        if operation.signature in took
        else replace(estimate, seconds=scale * estimate.seconds)
        for operation, estimate in zip(operations, estimates, strict=True)
    ]
    return Costing(_without_loss(lowered.graph, costs), MeasuredCosts.name)


def captured_costs(
    lowered: LoweredGraph, costing: Costing, over: Mapping[int, int], here: torch.device | None, parameters: int
) -> tuple[OperationCost, ...]:
    """Return costs as they are in a captured step on a CPU, some of whose operations write ``over`` a value.

    What such an operation reads first was made just before and is in a cache, and there is no new memory to write
    to: a sum takes a third of what it takes alone. A graph transformer of many sums was predicted at 0.99 of
    eager's time without recompute, and took 0.92.
    """
    if not _is_timed_on_a_cpu(here, costing):
        return costing.costs
    limit = SECONDS_FOR_EACH_OPERATION * len(lowered.graph.operations)
    trials = profiling.QUICK
    took = profiling.measure(lowered, costing.costs, here, time_limit_seconds=limit, trials=trials, over=over)
    found = {index: took.measurements.get(profiling.signature_over(lowered, index, over[index])) for index in over}
    costs = [
        replace(one.cost, workspace_bytes=cost.workspace_bytes) if (one := found.get(index)) else cost
        for index, cost in enumerate(costing.costs)
    ]
    host_seconds = (_CAPTURED_STEP + _PARAMETER * parameters) * runs.seconds_of_a_call()
    loss = lowered.graph.loss_index  # with what else runs outside the graph
    in_step = [replace(cost, seconds=host_seconds) if index == loss else cost for index, cost in enumerate(costs)]
    return in_base_order(lowered.graph, in_step)


def eager_costs(
    graph: TrainingGraph,
    costing: Costing,
    here: torch.device | None,
    calls: int,
    regions: Collection[Region],
    parts: Callable[[str], int],
) -> Sequence[OperationCost]:
    """Return costs as they are in a step of plain eager that calls so many operators, views among them.

    ``parts`` says how many modules there are in that of a region.
    """
    free = OperationCost(seconds=0.0)  # of what runs nothing, and only says how long something lives
    runs_nothing = {index for index, o in enumerate(graph.operations) if o.target in (*BOOKKEEPING, END)}
    if not _is_timed_on_a_cpu(here, costing) or not calls:  # by a profile there are none
        return [free if index in runs_nothing else cost for index, cost in enumerate(costing.costs)]
    call_seconds = runs.seconds_of_a_call()
    # Each operation has its share: a checkpoint's second run takes the host's part again.
    seconds = _EAGER_CALL * calls * call_seconds / (len(graph.operations) - len(runs_nothing))
    again = _AGAIN * call_seconds
    costs = [replace(cost, seconds=cost.seconds + seconds + again, again_seconds=again) for cost in costing.costs]
    costs = list(in_base_order(graph, [free if i in runs_nothing else cost for i, cost in enumerate(costs)]))
    for region in regions:
        keeps = [one for one in region.keepable if one.is_choice] or region.keepable
        calls_of = {one.stand_in: 2 * _DISPATCHED * len(region.recompute) / len(keeps) for one in keeps}
        calls_of[region.recompute[-1]] = _REGION + _PART * parts(region.module)
        for index, count in calls_of.items():
            costs[index] = OperationCost(seconds=count * call_seconds, again_seconds=count * call_seconds)
    return costs


def _is_timed_on_a_cpu(here: torch.device | None, costing: Costing) -> TypeGuard[torch.device]:
    return here is not None and here.type == "cpu" and costing.cost_model == MeasuredCosts.name


def _by_profile(
    lowered: LoweredGraph,
    spec: DeviceSpec,
    estimates: tuple[OperationCost, ...],
    profile: Profile,
    inputs: tuple[tuple[int, ...], ...],
) -> Costing:
    """Take costs from a profile of this step."""
    graph = lowered.graph
    if profile.device != spec.name:
        raise ProfileMismatchError(
            f"the profile is of {profile.device}, the plan for {spec.name}: name that device, or profile this one"
        )
    if profile.torch.split("+")[0] != torch.__version__.split("+")[0]:
        raise ProfileMismatchError(f"the profile is of torch {profile.torch}, not {torch.__version__}: profile again")
    expected = {operation.signature for operation in profile.operations} - {""}
    wanted = {operation.signature for operation in graph.operations} - {""}
    if not wanted <= expected:
        example = next(o for o in graph.operations if o.signature and o.signature not in expected)
        raise ProfileMismatchError(
            f"the profile is of another step ({profile.model}, inputs {_shapes(profile.inputs)}; here "
            f"{_shapes(inputs)}): {len(wanted - expected)} of {len(wanted)} different operations are not in it, "
            f"for example {example.target} in {example.module or 'the model'}; profile this one"
        )
    return Costing(_without_loss(graph, filled(graph.operations, estimates, profile)), MeasuredCosts.name, profile)


def _warnings(outcome: profiling.Outcome) -> Iterator[Finding]:
    if outcome.failed:
        targets = sorted({signature.split("(")[0] for signature in outcome.failed})
        yield Finding(
            rule="not-measured",
            evidence=f"{len(outcome.failed)} different operations could not be run alone: {', '.join(targets)}",
            cause="they cost what the roofline says",
            fix="nothing to do, if they are a small part of the step",
        )
    if outcome.skipped:
        yield Finding(
            rule="not-measured",
            evidence=f"after {outcome.seconds:.0f} s, {len(outcome.skipped)} operations were left unmeasured",
            cause="they cost what the roofline says, by which they are the cheapest",
            fix="record a profile with a longer --time-limit",
        )


def _shapes(inputs: Sequence[Sequence[int]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in inputs)
