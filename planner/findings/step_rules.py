"""Rules on the bytes and seconds of a captured step: what recompute cannot make smaller, or need not."""

from __future__ import annotations

from collections.abc import Callable

from planner.common.units import format_bytes, format_percent
from planner.findings.finding import collapsed
from planner.findings.rules import CapturedStep, Rule, Subject
from planner.ir.graph import Operation, TrainingGraph
from planner.ir.simulator import lifetimes

_DOMINATING_STATIC = 0.8
_DOMINATING_VALUE = 0.4
_DOMINATING_LOGITS = 0.3
_LOSS_TARGETS = ("log_softmax", "nll_loss", "cross_entropy")


def _of_step(evidence: Callable[[CapturedStep], str]) -> Callable[[Subject], str]:
    """Ask about the captured step; where there is none, nothing is seen."""
    return lambda subject: "" if subject.step is None else evidence(subject.step)


@_of_step
def _resident(step: CapturedStep) -> str:
    kinds, static_bytes = step.problem.graph.static_bytes, step.problem.graph.total_static_bytes
    share = static_bytes / _whole_bytes(step)
    if share < _DOMINATING_STATIC:
        return ""
    largest = [kind for kind in sorted(kinds, key=lambda kind: -kinds[kind]) if kinds[kind]]
    return (
        f"{format_percent(share)} of {format_bytes(_whole_bytes(step))} ({format_bytes(static_bytes)}: "
        f"{collapsed(largest)}) is resident before the step"
    )


@_of_step
def _logits(step: CapturedStep) -> str:
    graph = step.problem.graph
    around = _around_loss(graph)
    alive = [value for value in _alive_at_peak(step) if value in around]
    alive_bytes = sum(graph.values[value].size_bytes for value in alive)
    share = alive_bytes / max(step.evaluation.peak_bytes, 1)
    if share < _DOMINATING_LOGITS:
        return ""
    makers = [_place(graph.operations[graph.producer[value]]) for value in alive]
    return (
        f"{format_bytes(alive_bytes)} made by {collapsed(makers)}, "
        f"{format_percent(share)} of what the step holds at its peak"
    )


@_of_step
def _one_value(step: CapturedStep) -> str:
    graph = step.problem.graph
    largest = max(_alive_at_peak(step), key=lambda value: graph.values[value].size_bytes, default=None)
    if largest is None:
        return ""
    size_bytes = graph.values[largest].size_bytes
    share = size_bytes / max(step.evaluation.peak_bytes, 1)
    if share < _DOMINATING_VALUE or largest in _around_loss(graph):
        return ""  # of logits another rule says more
    return (
        f"one value of {format_bytes(size_bytes)}, made by {_place(graph.operations[graph.producer[largest]])}, "
        f"is {format_percent(share)} of what the step holds at its peak"
    )


def _around_loss(graph: TrainingGraph) -> set[int]:
    """Return the values that a loss over classes reads and makes."""
    return {
        value
        for operation in graph.operations
        if any(target in operation.target for target in _LOSS_TARGETS)
        for value in (*operation.inputs, *operation.outputs)
    }


def _alive_at_peak(step: CapturedStep) -> list[int]:
    peak = step.evaluation.peak_position
    copies = lifetimes(step.problem.graph, step.schedule)
    return [copy.value for copy in copies if copy.born <= peak <= copy.died]


def _whole_bytes(step: CapturedStep) -> int:
    return max(step.problem.budget_bytes + step.problem.graph.total_static_bytes, 1)


def _place(operation: Operation) -> str:
    return f"{operation.target} in {operation.module or 'the model'}"


RULES = (
    Rule(
        name="static-dominates",
        evidence=_resident,
        cause="recompute only frees saved activations, not this",
        fix="keep parameters in a smaller dtype, use an optimizer that keeps less (adafactor, adam8bit), train fewer "
        "parameters, or shard (fsdp2)",
    ),
    Rule(
        name="logits-dominate",
        evidence=_logits,
        cause="logits, their log-softmax and their gradient are in memory at the same time, whatever else is "
        "recomputed",
        fix="compute the loss in chunks (--chunk auto, runtime=Runtime(chunk='auto')), or with a fused linear "
        "cross-entropy",
    ),
    Rule(
        name="one-value-dominates",
        evidence=_one_value,
        cause="no plan has a lower peak than its largest operation",
        fix="compute it in chunks (--chunk auto, runtime=Runtime(chunk='auto')), where its rows are independent of "
        "each other",
    ),
)
"""What limits any plan; asked of a plan that recomputes, and of the step without recompute."""
