"""A training step cut into the stages of a pipeline: for each its own graph, with what it is sent and sends.

The forward is cut where a layer begins. A backward operation goes to the stage of its layer, or to
an earlier one if it reads what is made there. What one stage makes and another reads is handed
over: the stage that reads has it from the beginning of its forward, or of its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from planner.errors import UsageError
from planner.ir.cut_points import turning_point
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


def cut(
    graph: TrainingGraph, costs: Sequence[OperationCost], count: int, *, holds_received: bool = False
) -> tuple[Stage, ...]:
    """Cut a step, of one micro-batch, into stages that take about equally long.

    The longest forward of a stage is as short as it can be. O(count x layers^2 + values). A stage may hold the
    gradients that it receives until its backward ends, and not only until they are read. A UsageError says that there
    are more stages than layers.
    """
    graph, costs = _copies_apart(graph, costs)
    stage_of, names = _assign(graph, costs, count)
    return tuple(
        _Cut(graph, costs, stage_of, index, count).stage(names[index], holds_received) for index in range(count)
    )


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
    made = _Builder(graph)
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


def _assign(
    graph: TrainingGraph, costs: Sequence[OperationCost], count: int
) -> tuple[list[int | None], list[tuple[str, ...]]]:
    """Return the stage of each operation (None: sums of shares of a gradient, which no stage runs), and the layers."""
    layers, turn = find_layers(graph).of, turning_point(graph)
    begins: dict[str, int] = {}
    for index in range(turn):
        if layers[index]:
            begins.setdefault(layers[index], index if begins else 0)
    begins = begins or {"": 0}
    if count > len(begins):
        raise UsageError(
            f"{count} stages need at least as many layers, and {graph.name or 'the model'} has {len(begins)}: "
            "ask for fewer stages"
        )
    places = [*begins.values(), turn]
    seconds = [sum(costs[i].seconds for i in range(*ends)) for ends in pairwise(places)]
    firsts = balanced(seconds, count)
    names = [tuple(list(begins)[a:b]) for a, b in zip(firsts, [*firsts[1:], len(begins)], strict=True)]
    home = {name: stage for stage, of_stage in enumerate(names) for name in of_stage}
    stage_of: list[int | None] = [sum(index >= places[first] for first in firsts) - 1 for index in range(turn)]
    here = count - 1
    for index in range(turn, len(graph.operations)):
        operation = graph.operations[index]
        if operation.phase is Phase.LOSS:
            stage_of.append(count - 1)
            continue
        makers = {graph.producer[value] for value in operation.inputs}
        later = [stage for maker in makers if maker >= turn and (stage := stage_of[maker]) is not None]
        # What no layer names, as the sum of gradients where paths meet, is as late as what it reads allows.
        latest = min(later, default=here)
        # A module that is called in several stages is where it made what is read.
        called = [stage_of[maker] or 0 for maker in makers if maker < turn and layers[maker] == layers[index]]
        own = max(called, default=home.get(layers[index], latest))
        here = min(own, latest if later else count - 1)
        stage_of.append(None if len(set(later)) > 1 and _sums_gradients(graph, operation) else here)
    return stage_of, names


def balanced(seconds: Sequence[float], count: int) -> list[int]:
    """Cut a row into groups so that the largest is as small as can be, then all as equal as can be.

    >>> balanced([1, 1, 1, 1, 3], 3)
    [0, 2, 4]
    """
    before = [0.0, *accumulate(seconds)]
    best: list[tuple[float, float, list[int]]] = [(before[end], before[end] ** 2, [0]) for end in range(len(before))]
    for groups in range(2, count + 1):
        best = [
            min(
                (max(best[at][0], before[end] - before[at]), best[at][1] + (before[end] - before[at]) ** 2,
                 [*best[at][2], at])
                for at in range(groups - 1, end)
            )
            if end >= groups
            else best[end]
            for end in range(len(before))
        ]  # fmt: skip
    return best[-1][2]


def _copies_apart(
    graph: TrainingGraph, costs: Sequence[OperationCost]
) -> tuple[TrainingGraph, Sequence[OperationCost]]:
    """Split the last operation if it copies several gradients, which may be of several stages, one to one."""
    last = graph.operations[-1]
    sizes = [[graph.values[value].size_bytes for value in values] for values in (last.inputs, last.outputs)]
    if last.phase is not Phase.BACKWARD or len(last.outputs) < 2 or sizes[0] != sizes[1]:
        return graph, costs
    copies = [
        replace(last, name=f"{last.name} {number}", key=f"{last.key} {number}", inputs=(read,), outputs=(made,))
        for number, (read, made) in enumerate(zip(last.inputs, last.outputs, strict=True))
    ]
    each = OperationCost(seconds=costs[-1].seconds / len(copies), workspace_bytes=costs[-1].workspace_bytes)
    return replace(graph, operations=(*graph.operations[:-1], *copies), runs_after=None), [
        *costs[:-1],
        *[each] * len(copies),
    ]


def _sums_gradients(graph: TrainingGraph, operation: Operation) -> bool:
    """Whether an operation only adds what several uses of one parameter give: each stage keeps its own share."""
    if len(operation.outputs) != 1 or graph.readers[operation.outputs[0]]:
        return False
    made = graph.values[operation.outputs[0]]
    return (made.retained and made.kind == "gradient") and all(
        graph.values[value].size_bytes == made.size_bytes and len(graph.readers[value]) == 1
        for value in operation.inputs
    )


class _Builder:
    """Builds the graph of one stage, operation by operation."""

    def __init__(self, whole: TrainingGraph) -> None:
        self.whole = whole
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.costs: list[OperationCost] = []

    def new(self, value: Value) -> int:
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


class _Cut(_Builder):
    """Builds the graph of one stage of a whole step."""

    def __init__(
        self, graph: TrainingGraph, costs: Sequence[OperationCost], stage_of: list[int | None], index: int, count: int
    ) -> None:
        super().__init__(graph)
        self.whole_costs, self.stage_of = costs, stage_of
        self.index, self.is_last = index, index == count - 1
        self.turn = turning_point(graph)
        self.local: dict[int, int] = {}

    def stage(self, layers: tuple[str, ...], holds_received: bool) -> Stage:
        own = [index for index, stage in enumerate(self.stage_of) if stage == self.index]
        read = dict.fromkeys(value for index in own for value in self.inputs_of(index))
        foreign = [value for value in read if self.home(value) != self.index]
        early = [value for value in foreign if self.is_forward(value) and (self.home(value) or 0) < self.index]
        beside_forward = self.others(Phase.FORWARD)
        self.hand_over("activations received", Phase.FORWARD, receives=[*self.received(early), *beside_forward])
        for index in own:
            if index < self.turn:
                self.add(index)
        made = [value for index in own for value in self.whole.operations[index].outputs]
        sent = [value for value in made if self.is_forward(value) and max(self.stages_with(value)) > self.index]
        self.hand_over("activations sent", Phase.FORWARD, sends=[self.local[value] for value in sent])
        # The one ends where the other begins, so that whatever is run again has one of them beside it.
        wait, beside_backward = len(self.operations), self.others(Phase.LOSS)
        self.hand_over("wait", Phase.LOSS, receives=beside_backward, sends=beside_forward)
        late = [value for value in foreign if value not in self.local]
        self.hand_over("gradients received", Phase.LOSS, receives=self.received(late))
        for index in own:
            if index >= self.turn:
                self.add(index)
        back = [value for value in made if min(self.stages_with(value)) < self.index]
        if holds_received:
            back += [value for value in late if not self.is_forward(value)]
        sends = [*(self.local[value] for value in back), *beside_backward]
        self.hand_over("gradients sent", Phase.BACKWARD, sends=sends)
        return self.finish(
            layers=layers,
            operations=tuple(own),
            wait=wait,
            beside=(*beside_forward, *beside_backward),
            gradient_bytes=sum(v.size_bytes for v in self.values if v.retained and v.kind == "gradient"),
        )

    def home(self, value: int) -> int | None:
        return self.stage_of[self.whole.producer[value]]

    def is_forward(self, value: int) -> bool:
        return self.whole.producer[value] < self.turn

    def inputs_of(self, index: int) -> list[int]:
        """Return what an operation reads here; the loss of the last stage leaves outputs of others where they are."""
        operation = self.whole.operations[index]
        if operation.phase is not Phase.LOSS:
            return list(operation.inputs)
        return [value for value in operation.inputs if self.home(value) == self.index]

    def stages_with(self, value: int) -> list[int]:
        """Return the stages that have a value: this one, and those that read it; the loss leaves it where it is."""
        operations = self.whole.operations
        readers = (reader for reader in self.whole.readers[value] if operations[reader].phase is not Phase.LOSS)
        return [self.index, *(stage for reader in readers if (stage := self.stage_of[reader]) is not None)]

    def add(self, index: int) -> None:
        operation = self.whole.operations[index]
        outputs = []
        for value in operation.outputs:
            made = self.whole.values[value]
            # This stage's share of the gradient of a parameter that others have too is summed nowhere.
            is_share = any(self.stage_of[reader] is None for reader in self.whole.readers[value])
            outputs.append(self.take(replace(made, retained=True, kind="gradient") if is_share else made, value))
        inputs = tuple(self.local[value] for value in self.inputs_of(index))
        self.operations.append(replace(operation, inputs=inputs, outputs=tuple(outputs)))
        self.costs.append(self.whole_costs[index])

    def take(self, value: Value, whole: int) -> int:
        """Add a value that stands for one of the whole step."""
        self.local[whole] = self.new(value)
        return self.local[whole]

    def received(self, values: list[int]) -> list[int]:
        return [self.take(replace(self.whole.values[v], retained=False, kind="activation"), v) for v in values]
