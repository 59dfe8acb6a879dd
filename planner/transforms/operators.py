"""What the rules of chunks and those of tensor parallelism both read off a call of an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from planner.capture.joint import tensors_of

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
TRANSPOSITIONS = (aten.t.default, aten.transpose.int, aten.permute.default)

SOFTMAX_DIM = {
    aten._softmax.default: 1,
    aten._safe_softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
}
"""Operators that mix one dimension, and the position of the argument that names it."""

SHAPE_ARGUMENT = {
    **dict.fromkeys(VIEWS, 1),
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
    aten.new_zeros.default: 1,
    aten.full.default: 0,
    aten.zeros.default: 0,
}
"""Operators that are told the shape of their output, and at which position."""


def shape_of(node: fx.Node) -> torch.Size:
    """Return the shape of a node's first tensor."""
    return tensors_of(node)[0].shape


def argument(node: fx.Node, position: int, default: Any = None) -> Any:
    """Return a positional argument of a call."""
    return node.args[position] if position < len(node.args) else default


def dims_of(given: int | Sequence[int] | None, count: int) -> set[int]:
    """Return the dimensions that an argument names, counted from the front: all where it names none.

    >>> dims_of(-1, 3), dims_of([0, -1], 3), dims_of(None, 2)
    ({2}, {0, 2}, {0, 1})
    """
    named = [given] if isinstance(given, int) else given or range(count)
    return {dim % count for dim in named}


def dims_before(node: fx.Node) -> list[int]:
    """Return where each dimension of what a transposition or permutation gives was before."""
    source, *named = node.args
    order = list(range(len(shape_of(source))))  # type: ignore[arg-type]
    if node.target is aten.permute.default:
        return [order[dim] for dim in named[0]]  # type: ignore[union-attr, index]
    first, second = named or (0, -1)
    if order:
        order[first], order[second] = order[second], order[first]  # type: ignore[index]
    return order
