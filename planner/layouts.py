"""Layouts as kernels give them, where fake tensors trace others.

Some elementwise operators are traced through a decomposition whose result is laid out in another way than the
kernel's (``elu_backward`` of a transposed gradient, say). What follows may then copy, and that would go unseen.
The order of dimensions in memory does not depend on sizes, so the kernel is asked on a handful of elements.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from planner import operands
from planner.joint import is_random, mutates, tensors_of
from planner.torch_internals import FakeTensor, OpOverload, storage_id


def correct_layouts(graph: fx.Graph) -> None:
    """Give the recorded results of elementwise operators the strides that their kernels give them.

    Parameters
    ----------
    graph : torch.fx.Graph
        Its nodes' recorded values are changed in place; storages that are shared stay shared.

    Notes
    -----
    O(nodes); only operators that read something not laid out in the usual way are run.
    """
    changed: set[fx.Node] = set()
    before: dict[int, torch.Tensor] = {}  # by storage; held, or another could come to have the same name
    for node in graph.nodes:
        if node.op != "call_function" or "val" not in node.meta:
            continue
        affected = not changed.isdisjoint(node.all_input_nodes)
        traced = {storage_id(tensor): tensor for tensor in tensors_of(node)}
        if node.target is operator.getitem:
            if not affected:
                continue
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        elif not isinstance(node.target, OpOverload) or mutates(node):
            continue
        elif affected and not traced.keys().isdisjoint(before):
            _view_again(node)
        elif not (affected or _reads_unusual(node)) or not _lay_out(node):
            continue
        changed.add(node)
        before |= traced


def _reads_unusual(node: fx.Node) -> bool:
    return any(not tensor.is_contiguous() for source in node.all_input_nodes for tensor in tensors_of(source))


def _view_again(node: fx.Node) -> None:
    """Record a view anew, of what it now looks at."""
    (like, *_) = tensors_of(node)
    with like.fake_mode, suppress(RuntimeError):  # type: ignore[attr-defined]
        node.meta["val"] = node.target(*_values(node.args), **_values(node.kwargs))  # type: ignore[operator]


def _lay_out(node: fx.Node) -> bool:
    """Give a node's result the strides of its kernel, and tell whether that changed anything."""
    outputs = tensors_of(node)
    read = [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]
    if len(outputs) != 1 or is_random(node) or storage_id(outputs[0]) in map(storage_id, read):
        return False
    (output,) = outputs
    if not isinstance(output, FakeTensor) or any(not _goes_with(tensor, output) for tensor in read):
        return False
    try:
        with operands.running_alone(torch.device("cpu")):
            found = node.target(*_in_small(node.args), **_in_small(node.kwargs))  # type: ignore[operator]
    except (RuntimeError, IndexError, TypeError, ValueError):
        return False  # it takes no sizes but its own
    if not isinstance(found, torch.Tensor) or found.dim() != output.dim() or found.stride() == _small(output).stride():
        return False
    with output.fake_mode:
        strides = _dense(output.shape, _order(found))
        node.meta["val"] = torch.empty_strided(output.shape, strides, dtype=output.dtype, device=output.device)
    return True


def _goes_with(tensor: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a tensor is of the result's sizes, or is broadcast to them."""
    sizes = zip(reversed(tensor.shape), reversed(output.shape), strict=False)
    return tensor.dim() <= output.dim() and all(own in (1, made) for own, made in sizes)


def _order(tensor: torch.Tensor) -> list[int]:
    """Give the dimensions in the order of their strides, the largest first."""
    strides = list(tensor.stride())
    return sorted(range(tensor.dim()), key=lambda d: -strides[d])


def _dense(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Give the strides of a tensor without holes whose dimensions come in an order.

    Examples
    --------
    >>> _dense([4, 3, 2], [0, 2, 1])
    [6, 1, 3]
    """
    strides, step = [0] * len(sizes), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= sizes[dimension]
    return strides


def _small(tensor: torch.Tensor) -> torch.Tensor:
    """Give zeros, laid out alike, with two elements along each dimension that has several."""
    sizes = [min(size, 2) for size in tensor.shape]
    made = torch.zeros(2 ** tensor.dim(), dtype=tensor.dtype)
    strides = _dense(sizes, _order(tensor))
    return made.as_strided(sizes, [s if tensor.stride(d) else 0 for d, s in enumerate(strides)])


def _values(arguments: Any) -> Any:
    return fx.map_arg(arguments, lambda source: source.meta.get("val"))


def _in_small(arguments: Any) -> Any:
    def small(value: Any) -> Any:
        return _small(value) if isinstance(value, torch.Tensor) else value

    return pytree.tree_map(small, _values(arguments))
