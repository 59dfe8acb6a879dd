"""A stage of a pipeline: its step for one micro-batch, with what other micro-batches hold beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.layers import find_layers
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.static_memory import LossPasses

IN_FLIGHT = "in flight"
"""Kind of the values that stand for other micro-batches."""

_HANDED_OVER = "a pipeline's communication"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a pipeline: paths of its layers, its operations of the whole step, and its step for one micro-batch.

    Between forward and backward of its graph stands an operation during which nothing runs, ``wait``. The values
    ``beside`` stand for what is held beside the micro-batch: in its forward what others save (of kind
    :data:`IN_FLIGHT`) and gradients, in its backward the same. They are empty until :meth:`problem` gives them a size.
    """

    layers: tuple[str, ...]
    operations: tuple[int, ...]
    graph: TrainingGraph
    costs: tuple[OperationCost, ...]
    wait: int
    beside: tuple[int, ...]
    gradient_bytes: int
    """Gradients of its parameters."""

    def problem(
        self, budget_bytes: int, beside_bytes: Sequence[int] | None = None, most_saved_bytes: int | None = None
    ) -> Problem:
        """Return the problem of this stage for one micro-batch while others are in flight, what is resident left out.

        What a micro-batch may hold while it waits for its backward can be bounded.
        """
        values, costs, bound_bytes = list(self.graph.values), list(self.costs), 0
        beside_bytes = beside_bytes or (0,) * len(self.beside)
        for value, size_bytes in zip(self.beside, beside_bytes, strict=True):
            values[value] = replace(values[value], size_bytes=size_bytes)
        if most_saved_bytes is not None:
            bound_bytes = budget_bytes - most_saved_bytes
        # What is beside it in the forward and in the backward would both count while it waits. Neither has to: each
        # does right before, or right after. With the rest of the workspace, nothing more than the bound fits.
        costs[self.wait] = OperationCost(seconds=0.0, workspace_bytes=bound_bytes - sum(beside_bytes))
        graph = replace(self.graph, values=tuple(values))
        return Problem(graph=graph, costs=tuple(costs), budget_bytes=budget_bytes)

    def as_run(self, schedule: Schedule) -> Schedule:
        """Return a schedule as it is run: what runs again before something is handed over does so right after."""
        order: list[int] = []
        pending: list[int] = []
        ran: set[int] = set()
        for index in schedule.order:
            if index in ran:
                pending.append(index)
                continue
            ran.add(index)
            if not self.graph.operations[index].target.startswith(_HANDED_OVER):
                order += pending
                pending = []
            order.append(index)
        return replace(schedule, order=(*order, *pending))


def whole_stage(
    graph: TrainingGraph,
    costs: Sequence[OperationCost],
    *,
    gradient_bytes: int,
    input_gradients: Collection[int],
    received: Collection[int],
    loss: LossPasses | None,
) -> Stage:
    """Return the step of a module that is a stage, captured alone, as a stage.

    Of its values, ``input_gradients`` are sent on and not added up, and ``received`` are resident: buffers that
    gradients arrive in. The last stage has a loss in place of those.
    """
    made = Builder(graph)
    made.values = list(graph.values)
    for index in input_gradients:
        made.values[index] = replace(made.values[index], kind="tangent")
    for index in received if loss is None else ():
        made.values[index] = replace(made.values[index], size_bytes=0)
    turn = graph.loss_index
    forward, backward = made.others(Phase.FORWARD), made.others(Phase.LOSS)
    made.hand_over("pass begins", Phase.FORWARD, receives=forward)
    made.operations += graph.operations[:turn]
    made.costs += costs[:turn]
    saved: tuple[int, ...] = ()
    if loss is not None:
        saved = (made.new(Value(name="saved by the loss", size_bytes=loss.saved_bytes)),)
        held = made.new(Value(name="loss", size_bytes=loss.held_bytes, retained=True, kind="output"))
        made.hand_over("loss forward", Phase.LOSS, receives=(*saved, held), workspace_bytes=loss.forward_bytes)
    wait = len(made.operations)
    made.hand_over("wait", Phase.LOSS, receives=backward, sends=forward)
    at_turn = graph.operations[turn]
    made.operations.append(replace(at_turn, inputs=(*at_turn.inputs, *saved)))
    made.costs.append(OperationCost(seconds=0.0, workspace_bytes=loss.backward_bytes if loss else 0))
    made.operations += graph.operations[turn + 1 :]
    made.costs += costs[turn + 1 :]
    made.hand_over("pass ends", Phase.BACKWARD, sends=backward)
    layers = dict.fromkeys(layer for layer in find_layers(graph).of if layer)
    return made.finish(
        layers=tuple(layers),
        operations=tuple(range(len(graph.operations))),
        wait=wait,
        beside=(*forward, *backward),
        gradient_bytes=gradient_bytes,
    )


class Builder:
    """Builds the graph of one stage, or of one layer of a whole step, operation by operation."""

    def __init__(self, whole: TrainingGraph) -> None:
        self.whole = whole
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.costs: list[OperationCost] = []

    def new(self, value: Value) -> int:
        """Add a value."""
        self.values.append(value)
        return len(self.values) - 1

    def others(self, phase: Phase) -> tuple[int, int]:
        """Add what stands for others' micro-batches, from that phase on."""
        return (
            self.new(Value(name=f"other micro-batches, {phase}", size_bytes=0, kind=IN_FLIGHT)),
            self.new(Value(name=f"gradients of earlier micro-batches, {phase}", size_bytes=0, kind="gradient")),
        )

    def hand_over(
        self,
        name: str,
        phase: Phase,
        *,
        receives: Sequence[int] = (),
        sends: Sequence[int] = (),
        workspace_bytes: int = 0,
    ) -> None:
        """Add an operation that takes no time."""
        self.operations.append(
            Operation(
                name=name,
                key=f"|{name}|{phase[0]}0",
                target=f"{_HANDED_OVER}: {name}",
                inputs=tuple(sends),
                outputs=tuple(receives),
                phase=phase,
                recomputable=False,
                dtype="",
            )
        )
        self.costs.append(OperationCost(seconds=0.0, workspace_bytes=workspace_bytes))

    def finish(self, **facts: Any) -> Stage:
        """Return the stage."""
        graph = replace(
            self.whole, operations=tuple(self.operations), values=tuple(self.values), static_bytes={}, runs_after=None
        )
        return Stage(graph=graph, costs=tuple(self.costs), **facts)
