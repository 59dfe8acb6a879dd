"""A training step of a whole model cut into its layers, each with a graph of its own, as if it were a stage alone.

The forward is cut where a layer begins. A backward operation goes to its layer, or to an earlier one
if it reads what is made there. What one layer makes and another reads is handed over: the one that
reads has it from the beginning of its forward, or of its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.extras.pipelines.stages import Builder, Stage
from planner.ir.cut_points import turning_point
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.layers import find_layers


def cut(graph: TrainingGraph, costs: Sequence[OperationCost]) -> tuple[Stage, ...]:
    """Cut a step, of one micro-batch, into its layers. O(layers x operations + values)."""
    graph, costs = _copies_apart(graph, costs)
    names, layer_of = _assign(graph)
    return tuple(_Cut(graph, costs, layer_of, index).stage(name) for index, name in enumerate(names))


def _assign(graph: TrainingGraph) -> tuple[list[str], list[int | None]]:
    """Return the layers, and that of each operation (None: sums of shares of a gradient, which no layer runs)."""
    layers, turn = find_layers(graph).of, turning_point(graph)
    number: dict[str, int] = {}
    layer_of: list[int | None] = []
    for index in range(turn):
        if layers[index]:
            number.setdefault(layers[index], len(number))
        layer_of.append(max(len(number) - 1, 0))
    last = here = max(len(number) - 1, 0)
    for index in range(turn, len(graph.operations)):
        operation = graph.operations[index]
        if operation.phase is Phase.LOSS:
            layer_of.append(last)
            continue
        makers = {graph.producer[value] for value in operation.inputs}
        later = [layer for maker in makers if maker >= turn and (layer := layer_of[maker]) is not None]
        # What no layer names, as the sum of gradients where paths meet, is as late as what it reads allows.
        latest = min(later, default=here)
        # A module that is called in several layers is where it made what is read.
        called = [layer_of[maker] or 0 for maker in makers if maker < turn and layers[maker] == layers[index]]
        own = max(called, default=number.get(layers[index], latest))
        here = min(own, latest if later else last)
        layer_of.append(None if len(set(later)) > 1 and _sums_gradients(graph, operation) else here)
    return list(number), layer_of


def _copies_apart(
    graph: TrainingGraph, costs: Sequence[OperationCost]
) -> tuple[TrainingGraph, Sequence[OperationCost]]:
    """Split the last operation if it copies several gradients, which may be of several layers, one to one."""
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
    """Whether an operation only adds what several uses of one parameter give: each layer keeps its own share."""
    if len(operation.outputs) != 1 or graph.readers[operation.outputs[0]]:
        return False
    made = graph.values[operation.outputs[0]]
    return (made.retained and made.kind == "gradient") and all(
        graph.values[value].size_bytes == made.size_bytes and len(graph.readers[value]) == 1
        for value in operation.inputs
    )


class _Cut(Builder):
    """Builds the graph of one layer of a whole step."""

    def __init__(
        self, graph: TrainingGraph, costs: Sequence[OperationCost], layer_of: list[int | None], index: int
    ) -> None:
        super().__init__(graph)
        self.whole_costs, self.layer_of, self.index = costs, layer_of, index
        self.turn = turning_point(graph)
        self.local: dict[int, int] = {}

    def stage(self, layer: str) -> Stage:
        own = [index for index, stage in enumerate(self.layer_of) if stage == self.index]
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
        sends = [*(self.local[value] for value in back), *beside_backward]
        self.hand_over("gradients sent", Phase.BACKWARD, sends=sends)
        return self.finish(
            layers=(layer,),
            operations=tuple(own),
            wait=wait,
            beside=(*beside_forward, *beside_backward),
            gradient_bytes=sum(v.size_bytes for v in self.values if v.retained and v.kind == "gradient"),
        )

    def home(self, value: int) -> int | None:
        return self.layer_of[self.whole.producer[value]]

    def is_forward(self, value: int) -> bool:
        return self.whole.producer[value] < self.turn

    def inputs_of(self, index: int) -> list[int]:
        """Return what an operation reads here; the loss of the last layer leaves outputs of others where they are."""
        operation = self.whole.operations[index]
        if operation.phase is not Phase.LOSS:
            return list(operation.inputs)
        return [value for value in operation.inputs if self.home(value) == self.index]

    def stages_with(self, value: int) -> list[int]:
        """Return the layers that have a value: this one, and those that read it; the loss leaves it where it is."""
        operations = self.whole.operations
        readers = (reader for reader in self.whole.readers[value] if operations[reader].phase is not Phase.LOSS)
        return [self.index, *(stage for reader in readers if (stage := self.layer_of[reader]) is not None)]

    def add(self, index: int) -> None:
        operation = self.whole.operations[index]
        outputs = []
        for value in operation.outputs:
            made = self.whole.values[value]
            # This layer's share of the gradient of a parameter that others have too is summed nowhere.
            is_share = any(self.layer_of[reader] is None for reader in self.whole.readers[value])
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
