"""Sums of gradients in place, as eager autograd makes them: a parameter used three times needs no third copy."""

from __future__ import annotations

import torch
from torch import fx

from planner.capture.joint import JointGraph, is_backward, tensors_of
from planner.capture.torch_internals import storage_id

aten = torch.ops.aten


def sum_in_place(joint: JointGraph) -> None:
    """Let each sum that ends in a parameter's gradient write into its first summand, where nobody else reads that.

    Autograd adds gradients of one tensor in place; tracing makes a new tensor of every sum. Written are only gradients
    that the step gives back, which no plan drops, so nothing is recomputed that was written to. The numbers are those
    of the sum made anew: adding is done element by element. O(nodes).
    """
    pending = [_origin(node) for node in joint.outputs[1] if isinstance(node, fx.Node)]
    while pending:
        node = pending.pop()
        if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        first = node.args[0]
        if not isinstance(first, fx.Node) or not is_backward(node) or not _is_free(first, node):
            continue
        node.target = aten.add_.Tensor
        _look_at(node, node.meta["val"], first.meta["val"])
        pending.append(_origin(first))


def _is_free(summand: fx.Node, total: fx.Node) -> bool:
    """Whether a sum may overwrite a summand: fresh memory of the same layout, which only the sum reads."""
    value, result = summand.meta.get("val"), total.meta["val"]
    if not isinstance(value, torch.Tensor):
        return False
    same = (value.shape, value.stride(), value.dtype) == (result.shape, result.stride(), result.dtype)
    whole = value.untyped_storage().nbytes() == value.nbytes
    return same and whole and _has_one_reader(summand)


def _origin(node: fx.Node) -> fx.Node:
    """Return what made the memory that a node looks at."""
    while node.op == "call_function" and (source := _viewed(node)) is not None:
        node = source
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    storages = {storage_id(tensor) for tensor in tensors_of(node)}
    found = (n for n in node.all_input_nodes if not storages.isdisjoint(map(storage_id, tensors_of(n))))
    return next(found, None)


def _has_one_reader(node: fx.Node) -> bool:
    """Whether what a node gives is read once, and so is whatever it is a view of, back to what made it."""
    while node.op == "call_function" and len(node.users) == 1 and is_backward(node):
        if (source := _viewed(node)) is None:
            return True
        node = source
    return False


def _look_at(node: fx.Node, before: torch.Tensor, after: torch.Tensor) -> None:
    """Record that a node, and every view of what it gave, now looks at other memory."""
    storage = storage_id(before)
    node.meta["val"] = after
    pending = list(node.users)
    while pending:
        user = pending.pop()
        value = user.meta.get("val")
        if user.op == "call_function" and isinstance(value, torch.Tensor) and storage_id(value) == storage:
            user.meta["val"] = after.as_strided(value.shape, value.stride(), value.storage_offset())
            pending.extend(user.users)
