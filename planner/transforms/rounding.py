"""What of a step may be rounded to bfloat16 while it waits on the host, and what must then run once.

Rounded numbers are off by at most a 256th part, and gradients with them. That is all that may happen, so of the
values of the forward these alone may be rounded: numbers of float32 under every view of their storage; derived from
what the step differentiates, so no masks, targets and tables; the first result of their operation, so neither the
means and deviations of norms nor the logarithms of attention; and no sums or maxima over many numbers, which are small
and matter much.

Two things would go wrong, and not only be off. What is compared for equality would no longer be equal, as in the
backward of a maximum: such values stay exact, and are not made again from others that need not be. And indices
that are made from numbers could come out otherwise when made again, as where a router picks its experts: what makes
them runs once. If it runs in the backward, what it is made from stays exact.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from planner.capture.joint import is_attention, tensors_of
from planner.capture.lowering import LoweredGraph
from planner.capture.torch_internals import OpOverload, storage_id
from planner.ir.graph import Phase

_COMPARE = (torch.ops.aten.eq, torch.ops.aten.ne)

_INDICES = (torch.int16, torch.int32, torch.int64)


def marked(lowered: LoweredGraph) -> LoweredGraph:
    """Mark the values of a graph that may be rounded, and the operations that then run once."""
    graph = lowered.graph
    derived = _derived(lowered)
    exact: set[int] = set()
    deciding: set[int] = set()
    for index, node in enumerate(lowered.operation_nodes):
        if node is None or derived.isdisjoint(node.all_input_nodes):
            continue
        makes_indices = not is_attention(node) and any(tensor.dtype in _INDICES for tensor in tensors_of(node))
        if makes_indices:
            deciding.add(index)
        if _compares(node) or (makes_indices and graph.operations[index].phase is Phase.BACKWARD):
            exact.update(_read(lowered, node))
    deciding.update(graph.producer[value] for value in exact)
    roundable = {
        value
        for value in _numbers(lowered)
        if lowered.value_nodes[value] in derived and value not in exact and _is_main(lowered.value_nodes[value])
    }
    return replace(
        lowered,
        graph=replace(
            graph,
            values=tuple(replace(v, roundable=True) if u in roundable else v for u, v in enumerate(graph.values)),
            operations=tuple(
                replace(operation, decides=True) if index in deciding else operation
                for index, operation in enumerate(graph.operations)
            ),
        ),
    )


def _derived(lowered: LoweredGraph) -> set[fx.Node]:
    """Return the nodes that hold numbers, or answers about numbers, derived from what the step differentiates."""
    _, gradients = lowered.joint.outputs
    inputs = lowered.joint.graph.find_nodes(op="placeholder")
    derived = {node for node, gradient in zip(inputs, gradients, strict=False) if gradient is not None}
    for node in lowered.joint.graph.nodes:
        holds = any(t.dtype is torch.bool or t.is_floating_point() for t in tensors_of(node))
        if holds and not derived.isdisjoint(node.all_input_nodes):
            derived.add(node)
    return derived


def _numbers(lowered: LoweredGraph) -> Iterator[int]:
    """Return the values of the forward that are of float32, whichever way they are looked at."""
    graph = lowered.graph
    value_of = {
        storage_id(tensors_of(node)[0]): value
        for value, node in enumerate(lowered.value_nodes)
        if node is not None and len(tensors_of(node)) == 1 and not graph.values[value].retained
    }
    types: defaultdict[int, set[torch.dtype]] = defaultdict(set)
    for node in lowered.joint.graph.nodes:
        for tensor in tensors_of(node):
            types[value_of.get(storage_id(tensor), -1)].add(tensor.dtype)
    for value in value_of.values():
        if types[value] == {torch.float32} and graph.operations[graph.producer[value]].phase is Phase.FORWARD:
            yield value


def _is_main(node: fx.Node) -> bool:
    """Whether a node is the first result of its operation, and no sum or maximum over many numbers."""
    if node.target is operator.getitem:
        return bool(node.args[1] == 0) and all(_is_main(source) for source in node.all_input_nodes)
    return not (isinstance(node.target, OpOverload) and torch.Tag.reduction in node.target.tags)


def _compares(node: fx.Node) -> bool:
    is_equality = isinstance(node.target, OpOverload) and node.target.overloadpacket in _COMPARE
    return is_equality and any(t.is_floating_point() for source in node.all_input_nodes for t in tensors_of(source))


def _read(lowered: LoweredGraph, node: fx.Node) -> Iterator[int]:
    """Return the values of the forward that a node reads, or the backward makes what it reads of."""
    graph = lowered.graph
    seen: set[int] = set()
    pending = [value for source in node.all_input_nodes for value in lowered.storage_of[source]]
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = graph.producer[value]
        if graph.operations[producer].phase is Phase.BACKWARD:
            pending.extend(graph.operations[producer].inputs)
        else:
            yield value
