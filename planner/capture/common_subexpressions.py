"""Merge equal pure operations of a graph, as torch's partitioner does before it partitions.

Torch's own pass (``fx_graph_cse``) is not called. It merges draws of random numbers that its list does not name, such
as two ``randn_like`` of one tensor. And it imports all of Inductor, which takes two seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from planner.capture.joint import is_random, mutates, tensors_of
from planner.capture.torch_internals import HigherOrderOperator, storage_id

aten = torch.ops.aten

COMPUTED_AGAIN = "computed again"
"""In what is kept of a node: eager's backward computes it again, for it is not saved."""

_MADE_ANEW = {aten.empty.memory_format, aten._local_scalar_dense.default}
"""Empty memory is to be filled, and each number that is read from a tensor has a symbol of its own."""


def eliminate_common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph in which equal operations on equal inputs are one.

    Operations stay apart if they draw random numbers, if a write lies between them, or if their result shares memory
    with an output: outputs that are equal are two tensors in eager mode. Where a backward that is written by hand
    computes again what the forward has computed, the one that is left is marked :data:`COMPUTED_AGAIN`. Takes time
    linear in the size of the graph.
    """
    of_outputs = {storage_id(t) for node in graph.output_node().all_input_nodes for t in _strided_of(node)}
    read = {source for node in graph.nodes if not _is_forward(node) for source in node.all_input_nodes}
    # What the traced backward reads from the forward, which eager saves.
    saved = {storage_id(tensor) for source in read if _is_forward(source) for tensor in _strided_of(source)}
    copy = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if _has_effects(node):
            known.clear()  # what was read before may now be something else
        key = _key(node, copied) if _is_mergeable(node, of_outputs) else None
        if key is None:
            copied[node] = copy.node_copy(node, copied.__getitem__)
            continue
        if key not in known:
            known[key] = copy.node_copy(node, copied.__getitem__)
        copied[node] = known[key]
        if not (_is_forward(node) or _is_there(known[key], saved)):
            known[key].meta[COMPUTED_AGAIN] = True
    return copy


def _is_forward(node: fx.Node) -> bool:
    """Whether AOTAutograd traced a node for the forward: those of a backward that is written by hand have no mark."""
    return node.meta.get("partitioner_tag") == "is_forward"


def _is_there(left: fx.Node, saved: set[int]) -> bool:
    """Whether a node that replaces one of the backward is available there: computed in it, saved, or a view."""
    own = {storage_id(tensor) for tensor in _strided_of(left)}
    read = {storage_id(tensor) for source in left.all_input_nodes for tensor in _strided_of(source)}
    return not _is_forward(left) or own <= saved | read


def _strided_of(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(node) if tensor.layout is torch.strided]


def _has_effects(node: fx.Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):
        return "mutation" in str(node.target) or "effects" in str(node.target)
    return mutates(node)


def _is_mergeable(node: fx.Node, of_outputs: set[int]) -> bool:
    return (
        node.op == "call_function"
        and node.target not in _MADE_ANEW
        and not is_random(node)
        and not _has_effects(node)
        and all(storage_id(tensor) not in of_outputs for tensor in _strided_of(node))
    )


def _key(node: fx.Node, copied: dict[fx.Node, fx.Node]) -> Any:
    """Return a key that only equal calls share; None if there is none."""
    key = node.target, _frozen(node.args, copied), _frozen(node.kwargs, copied)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(argument: Any, copied: dict[fx.Node, fx.Node]) -> Any:
    """Return a hashable argument that tells 1, 1.0 and True apart, and 0.0 and -0.0."""
    if isinstance(argument, fx.Node):
        return copied[argument]
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple(_frozen(part, copied) for part in argument)
    if isinstance(argument, dict):
        return dict, tuple((name, _frozen(part, copied)) for name, part in argument.items())
    if isinstance(argument, slice):
        return slice, _frozen((argument.start, argument.stop, argument.step), copied)
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(argument), argument.node
    if isinstance(argument, (float, complex)):
        return type(argument), repr(argument)
    return type(argument), argument
