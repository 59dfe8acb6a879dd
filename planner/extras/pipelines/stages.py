"""A stage of a pipeline: its step for one micro-batch, with what other micro-batches hold beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

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
    """One stage of a pipeline: the paths of its layers, and its step for one micro-batch.

    Between forward and backward of its graph stands an operation during which nothing runs, ``wait``. The values
    ``beside`` stand for what is held beside the micro-batch: in its forward what others save (of kind
    :data:`IN_FLIGHT`) and gradients, in its backward the same. They are empty until :meth:`problem` gives them a size.
    """

    layers: tuple[str, ...]
    graph: TrainingGraph
    costs: tuple[OperationCost, ...]
    wait: int
    beside: tuple[int, ...]
    gradient_bytes: int
    """Gradients of its parameters."""

    def problem(self, budget_bytes: int, beside_bytes: Sequence[int], most_saved_bytes: int | None = None) -> Problem:
        """Return the problem of this stage for one micro-batch while others are in flight, what is resident left out.

        What a micro-batch may hold while it waits for its backward can be bounded.
        """
        values, costs, bound_bytes = list(self.graph.values), list(self.costs), 0
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
    values = list(graph.values)
    for index in input_gradients:
        values[index] = replace(values[index], kind="tangent")
    for index in received if loss is None else ():
        values[index] = replace(values[index], size_bytes=0)

    def new(*made: Value) -> tuple[int, ...]:
        values.extend(made)
        return tuple(range(len(values) - len(made), len(values)))

    def others(phase: Phase) -> tuple[int, ...]:
        return new(
            Value(name=f"other micro-batches, {phase}", size_bytes=0, kind=IN_FLIGHT),
            Value(name=f"gradients of earlier micro-batches, {phase}", size_bytes=0, kind="gradient"),
        )

    turn, runs = graph.loss_index, list(zip(graph.operations, costs, strict=True))
    forward, backward = others(Phase.FORWARD), others(Phase.LOSS)
    before = [_handed_over("pass begins", Phase.FORWARD, receives=forward), *runs[:turn]]
    at_turn = graph.operations[turn]
    if loss is not None:
        saved = new(Value(name="saved by the loss", size_bytes=loss.saved_bytes))
        held = new(Value(name="loss", size_bytes=loss.held_bytes, retained=True, kind="output"))
        before.append(_handed_over("loss forward", Phase.LOSS, (*saved, *held), workspace_bytes=loss.forward_bytes))
        at_turn = replace(at_turn, inputs=(*at_turn.inputs, *saved))
    after = [
        _handed_over("wait", Phase.LOSS, receives=backward, sends=forward),
        (at_turn, OperationCost(seconds=0.0, workspace_bytes=loss.backward_bytes if loss else 0)),
        *runs[turn + 1 :],
        _handed_over("pass ends", Phase.BACKWARD, sends=backward),
    ]
    operations, costs = zip(*before, *after, strict=True)
    return Stage(
        layers=tuple(dict.fromkeys(layer for layer in find_layers(graph).of if layer)),
        graph=replace(graph, operations=operations, values=tuple(values), static_bytes={}, runs_after=None),
        costs=costs,
        wait=len(before),
        beside=(*forward, *backward),
        gradient_bytes=gradient_bytes,
    )


def _handed_over(
    name: str, phase: Phase, receives: tuple[int, ...] = (), sends: tuple[int, ...] = (), workspace_bytes: int = 0
) -> tuple[Operation, OperationCost]:
    """Return an operation that takes no time."""
    operation = Operation(
        name=name,
        key=f"|{name}|{phase[0]}0",
        target=f"{_HANDED_OVER}: {name}",
        inputs=sends,
        outputs=receives,
        phase=phase,
        recomputable=False,
        dtype="",
    )
    return operation, OperationCost(seconds=0.0, workspace_bytes=workspace_bytes)
