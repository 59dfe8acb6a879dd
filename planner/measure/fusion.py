"""Cost of operations in kernels that Inductor fuses: memory traffic only where a fused kernel begins and ends.

An operation that Inductor writes itself is computed in the kernel of its neighbours, as far as the next library call.
Its price is its arithmetic, what it reads that was there before that kernel, and what it makes that is read after it,
or leaves the step. To compute such a chain again inside its reader costs reads, and neither a launch nor a write: what
the forward makes for the backward alone is written only where it is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_models.devices import DeviceSpec
from cost_models.roofline import RooflineCosts
from planner.capture.inductor_order_internals import writes_into_a_copy
from planner.capture.joint import values_of
from planner.capture.lowering import LoweredGraph
from planner.capture.trees import tensors_in
from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.in_place import InPlace, fused, stretches

_PLAIN = ("aten.add.Tensor", "aten.mul.Tensor")


def written_by_inductor(lowered: LoweredGraph) -> frozenset[int]:
    """Return the operations, by index, that Inductor writes itself; none where it does not compile the graph."""
    nodes = enumerate(lowered.operation_nodes)
    return frozenset(index for index, node in nodes if node is not None and lowered.is_written_by_inductor(node))


def in_kernels(lowered: LoweredGraph) -> InPlace:
    """Return a step in which what Inductor computes inside one kernel is one operation."""
    stored = [i for i, node in enumerate(lowered.operation_nodes) if node is not None and writes_into_a_copy(node)]
    return fused(lowered.graph, written_by_inductor(lowered), stored)


def results_over_inputs(
    lowered: LoweredGraph, found: InPlace, costs: Sequence[OperationCost]
) -> tuple[OperationCost, ...]:
    """Return costs of kernels that count a result once with the input in whose place Inductor writes it."""
    written, graph = written_by_inductor(lowered), found.graph
    made = list(costs)
    for index, parts in enumerate(found.parts):
        if parts[-1] not in written:
            continue
        free = [value for value in graph.operations[index].inputs if _is_free_after(graph, index, value)]
        for output in graph.operations[index].outputs:
            size_bytes = graph.values[output].size_bytes
            place = next((value for value in free if graph.values[value].size_bytes == size_bytes), None)
            if place is not None:
                free.remove(place)
                made[index] = replace(made[index], workspace_bytes=made[index].workspace_bytes - size_bytes)
    return tuple(made)


def _is_free_after(graph: TrainingGraph, index: int, value: int) -> bool:
    if graph.values[value].retained or graph.values[value].kind == "output" or graph.readers[value][-1] != index:
        return False
    phases = {graph.operations[reader].phase for reader in graph.readers[value]}
    return graph.operations[index].phase is Phase.BACKWARD or phases == {Phase.FORWARD}


def yardstick_of(lowered: LoweredGraph, written: frozenset[int]) -> int | None:
    """Return the largest sum or product that Inductor writes: how long it takes alone says how fast memory is here."""
    operations = lowered.graph.operations
    plain = (index for index in written if operations[index].target in _PLAIN and operations[index].signature)
    return max(plain, key=lambda index: operations[index].moved_bytes, default=None)


def fused_costs(
    lowered: LoweredGraph, costs: Sequence[OperationCost], written: frozenset[int], spec: DeviceSpec, scale: float = 1.0
) -> tuple[OperationCost, ...]:
    """Return the costs with those of operations that Inductor writes itself as they are inside a kernel.

    ``scale`` is how much longer than its roofline the yardstick takes, which memory alone bounds: so much slower is
    memory here, and arithmetic is not.
    """
    if not written:
        return tuple(costs)
    graph = lowered.graph
    indices, moved_bytes = sorted(written), _Traffic(lowered, written)
    inside = [replace(graph.operations[index], moved_bytes=moved_bytes(index)) for index in indices]
    here = replace(spec, bandwidth_bytes_per_second=spec.bandwidth_bytes_per_second / scale)
    priced = dict(zip(indices, RooflineCosts(here).costs(inside), strict=True))
    return tuple(
        replace(cost, seconds=max(0.0, priced[index].seconds - spec.launch_seconds), workspace_bytes=0)
        if index in priced
        else cost
        for index, cost in enumerate(costs)
    )


class _Traffic:
    """Counts what operations move between their kernels and memory: sizes that broadcast are read once."""

    def __init__(self, lowered: LoweredGraph, written: frozenset[int]) -> None:
        self.lowered, self.written = lowered, written
        self.stretch = stretches(lowered.graph, written)

    def __call__(self, index: int) -> int:
        graph, operation = self.lowered.graph, self.lowered.graph.operations[index]
        read = sum(graph.values[u].size_bytes for u in operation.inputs if not self._shares(index, graph.producer[u]))
        made = sum(graph.values[u].size_bytes for u in operation.outputs if self._is_stored(index, u))
        return read + self._resident_bytes(index) + made

    def _shares(self, index: int, other: int) -> bool:
        return other in self.written and self.stretch[other] == self.stretch[index]

    def _is_stored(self, index: int, value: int) -> bool:
        graph = self.lowered.graph
        phase = graph.operations[index].phase
        others = (reader for reader in graph.readers[value] if not self._shares(index, reader))
        return graph.values[value].retained or any(
            other not in self.written or graph.operations[other].phase is phase for other in others
        )

    def _resident_bytes(self, index: int) -> int:
        """Count what an operation reads of parameters, buffers and inputs, which are no values of the graph."""
        node = self.lowered.operation_nodes[index]
        assert node is not None
        known = self.lowered.graph_of(node).storage_of
        resident = [source for source in node.all_input_nodes if not known.get(source)]
        return sum(tensor.nbytes for tensor in tensors_in(values_of(resident)))
