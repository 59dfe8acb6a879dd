"""Find operations that can write their result over an input, and their in-place forms.

The numbers must be those of a result made anew. They are where each element is computed from the elements at its own
place, which torch's tag ``pointwise`` says; in softmax and its backward on a CPU, which go row by row and read a row
before they write it; and in what copies its first input, and then writes into the copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from planner.capture.joint import JointGraph, is_random, mutates, tensors_of
from planner.capture.lowering import LoweredGraph
from planner.capture.operands import is_opaque
from planner.capture.torch_internals import OpOverload, form_in_place, storage_id

aten = torch.ops.aten

_OF_ROWS = ("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data")
_BY_ROW = {getattr(aten, name).default for name in _OF_ROWS}

_INTO_A_COPY = {
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_put.default,
    aten.masked_scatter.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
}
"""Of their first input. Derivatives of indexing and of ``gather`` do so with zeros, which eager writes into."""


def may_overwrite(lowered: LoweredGraph, *, on_cpu: bool) -> dict[int, tuple[int, ...]]:
    """Return, by operation, the values whose memory its single result can reuse; O(nodes)."""
    operations = lowered.graph.operations
    written = _written(lowered.joint)
    found: dict[int, tuple[int, ...]] = {}
    for index, node in enumerate(lowered.operation_nodes):
        if node is None or len(operations[index].outputs) != 1 or not _goes_by_place(node, on_cpu=on_cpu):
            continue
        if not written.isdisjoint(storage_id(t) for argument in node.all_input_nodes for t in tensors_of(argument)):
            continue
        makers = ((u, lowered.operation_nodes[lowered.graph.producer[u]]) for u in operations[index].inputs)
        values = tuple(u for u, made_by in makers if _is_ours(made_by) and overwritten_argument(lowered, node, u))
        if values:
            found[index] = values
    return found


def overwritten_argument(lowered: LoweredGraph, node: fx.Node, value: int) -> fx.Node | None:
    """Return the argument with all of a value in the layout of the node's result; None if there is none."""
    shown = [argument for argument in node.all_input_nodes if value in lowered.storage_of.get(argument, ())]
    if len(shown) != 1 or form_in_place(node.target, node.args[:1] == (shown[0],)) is None or shown[0] not in node.args:
        return None
    if node.target in _INTO_A_COPY and node.args[0] is not shown[0]:
        return None
    read, (made,) = tensors_of(shown[0]), tensors_of(node)
    return shown[0] if len(read) == 1 and _layout(read[0]) == _layout(made) else None


def write_over(graph: fx.Graph, node: fx.Node, argument: fx.Node, resolve: Any) -> fx.Node:
    """Add a call of a node's operator to a graph, with arguments of that graph, that writes over one of them."""
    form = form_in_place(node.target, node.args[:1] == (argument,))
    assert form is not None
    called, keyword = form
    args, kwargs = fx.map_arg((node.args, node.kwargs), resolve)
    return graph.call_function(called, args, {**kwargs, keyword: resolve(argument)} if keyword else kwargs)


def _goes_by_place(node: fx.Node, *, on_cpu: bool) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or is_random(node):  # a random one that runs again is called in another way
        return False
    return torch.Tag.pointwise in target.tags or target in _INTO_A_COPY or (on_cpu and target in _BY_ROW)


def _is_ours(maker: fx.Node | None) -> bool:
    """Whether an operation's output is unshared: a custom operator may keep it."""
    target = maker.target if maker is not None else None
    return isinstance(target, OpOverload) and target.namespace == "aten" and not is_opaque(target)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.untyped_storage().nbytes()


def _written(joint: JointGraph) -> set[int]:
    """Return the storages that the step writes into, whose readers must not be moved."""
    writers = (node for node in joint.graph.nodes if node.op == "call_function" and mutates(node))
    return {storage_id(t) for node in writers for argument in node.all_input_nodes for t in tensors_of(argument)}
