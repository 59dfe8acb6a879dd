"""From the stages of one captured sample to a table: what each layer computes and moves, and what it could keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.analysis.splits.table import FULL, KEEP, Choice, Layer, Work, merged
from planner.common.limits import SolveLimits
from planner.errors import InfeasibleBudgetError
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph
from planner.ir.schedule import Schedule, recompute_lazily
from planner.ir.simulator import simulate
from planner.plans.pipeline_stages import Stage
from planner.solvers import solved

KEPT_SHARES = (0.75, 0.5, 0.25)
"""Between a layer that keeps all and one that runs wholly again, plans are made that keep these shares."""

ATTENTION = "scaled_dot_product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of operations from elsewhere, by their keys."""

    summed: Mapping[str, int]
    """Results that devices which share layers sum, and their bytes."""
    causal: Collection[str] = ()
    """Attention that skips half of its arithmetic."""
    experts: Collection[str] = ()
    """Products with the weights of experts."""
    ring: Mapping[str, int] = field(default_factory=dict)
    """Of attention in the forward, the bytes of keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWeights:
    """Bytes of what a layer's operations read of the model, and of what training holds for it."""

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    expert_share: float = 0.0


def layer_of(stage: Stage, weights: OwnWeights, facts: Facts, *, plans: bool) -> Layer:
    """Tabulate a stage of one layer; with ``plans`` also for what it could run again."""
    graph = _without_gradients(stage.graph)
    operations = [operation for operation in graph.operations if _runs(operation)]
    passes = {
        phase: [operation for operation in operations if (operation.phase is Phase.FORWARD) == phase]
        for phase in (True, False)
    }
    experts = [operation for operation in passes[True] if facts.experts and _is(operation, facts.experts)]
    size = [value.size_bytes for value in graph.values]
    sent_bytes = _sent_bytes(stage.graph)
    # What experts give is summed too where their devices share them.
    summed_by_experts = sent_bytes if experts else 0
    return Layer(
        forward=merged([_work(operation, graph, facts) for operation in passes[True]]),
        backward=merged([_work(operation, graph, facts) for operation in passes[False]]),
        choices=tuple(_choices(stage, graph, facts, plans)),
        parameter_bytes=weights.parameter_bytes,
        gradient_bytes=weights.gradient_bytes,
        optimizer_bytes=weights.optimizer_bytes,
        expert_share=weights.expert_share,
        boundary_bytes=sent_bytes,
        summed_forward_bytes=_told(passes[True], facts.summed) + summed_by_experts,
        summed_backward_bytes=_told(passes[False], facts.summed) + summed_by_experts,
        ring_bytes=_told(passes[True], facts.ring),
        routed_bytes=max((size[one.inputs[0]] for one in experts if one.inputs), default=0),
    )


def _runs(operation: Operation) -> bool:
    return bool(operation.dtype) and operation.phase is not Phase.LOSS


def _is(operation: Operation, keys: Collection[str]) -> bool:
    return any(key in keys for key in operation.keys)


def _without_gradients(graph: TrainingGraph) -> TrainingGraph:
    """Return a graph in which gradients of parameters take nothing: they are counted as resident."""
    values = (
        replace(value, size_bytes=0) if value.retained and value.kind == "gradient" else value for value in graph.values
    )
    return replace(graph, values=tuple(values))


def _work(operation: Operation, graph: TrainingGraph, facts: Facts) -> Work:
    """Tell what moves for each token from what moves for weights: the rest beyond the values read and made."""
    tokens = sum(graph.values[value].size_bytes for value in {*operation.inputs, *operation.outputs})
    moved_bytes = min(operation.moved_bytes, tokens)
    is_causal = _is(operation, facts.causal)
    return Work(
        target=operation.target,
        flops=operation.flops // 2 if is_causal else operation.flops,
        moved_bytes=moved_bytes,
        weight_bytes=operation.moved_bytes - moved_bytes,
        dtype=operation.dtype,
        is_attention=ATTENTION in operation.target,
        of_experts=_is(operation, facts.experts),
    )


def _sent_bytes(graph: TrainingGraph) -> int:
    sends = (operation for operation in graph.operations if operation.name == "activations sent")
    return max((graph.values[value].size_bytes for one in sends for value in one.inputs), default=0)


def _told(operations: Sequence[Operation], bytes_of: Mapping[str, int]) -> int:
    return sum(bytes_of.get(key, 0) for operation in operations for key in operation.keys)


def _choices(stage: Stage, graph: TrainingGraph, facts: Facts, plans: bool) -> list[Choice]:
    """Return the choices of a layer: keep all, plans in between, and run all again; the fewest bytes last."""
    keep = _choice(KEEP, Schedule.keep_all(graph), stage, graph, facts)
    if not plans:
        return [keep]
    forward = {
        value for operation in graph.operations[: stage.wait] if _again(operation) for value in operation.outputs
    }
    full = _choice(FULL, recompute_lazily(graph, {stage.wait: forward}), stage, graph, facts)
    found = [keep]
    problem = replace(stage, graph=graph).problem
    peak_bytes = 2 * (keep.saved_bytes + keep.working_bytes)
    effort = SolveLimits(time_limit_seconds=1.0, deterministic=True)
    for share in KEPT_SHARES:
        most = int(full.saved_bytes + share * (keep.saved_bytes - full.saved_bytes))
        try:
            schedule = solved(problem(peak_bytes, most_saved_bytes=most), "auto", effort=effort).schedule
        except InfeasibleBudgetError:
            schedule = recompute_lazily(graph, {stage.wait: forward})
        made = _choice(f"plan {share:.0%}", schedule, stage, graph, facts)
        # Each keeps no more than the one before it.
        found.append(made if made.saved_bytes <= found[-1].saved_bytes else replace(found[-1], name=made.name))
    return [*found, full]


def _again(operation: Operation) -> bool:
    return _runs(operation) and operation.recomputable


def _choice(name: str, schedule: Schedule, stage: Stage, graph: TrainingGraph, facts: Facts) -> Choice:
    costs: tuple[OperationCost, ...] = stage.costs
    found = simulate(graph, costs, schedule)
    saved_bytes = found.timeline_bytes[schedule.order.index(stage.wait)]
    again = [graph.operations[index] for before in schedule.recomputations().values() for index in before]
    return Choice(
        name=name,
        saved_bytes=saved_bytes,
        working_bytes=found.peak_bytes - saved_bytes,
        reruns=merged([_work(operation, graph, facts) for operation in again]),
        summed_bytes=_told(again, facts.summed),
    )
