"""What an operation is called with: a signature that tells kernels apart, and real tensors like its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from planner.joint import mutates, tensors_of
from planner.torch_internals import FakeTensor, OpOverload

aten = torch.ops.aten

_INDEX_BOUND = {
    aten.embedding.default: lambda args: args[0].shape[0],
    aten.embedding_dense_backward.default: lambda args: args[2],
    aten.nll_loss_forward.default: lambda args: args[0].shape[1],
    aten.nll_loss_backward.default: lambda args: args[1].shape[1],
    aten.nll_loss2d_forward.default: lambda args: args[0].shape[1],
    aten.nll_loss2d_backward.default: lambda args: args[1].shape[1],
    aten.gather.default: lambda args: args[0].shape[args[1]],
    aten.scatter.value: lambda args: args[0].shape[args[1]],
    aten.scatter_add.default: lambda args: args[0].shape[args[1]],
    aten.index_select.default: lambda args: args[0].shape[args[1]],
}
"""What whole numbers among the arguments must stay below, so that they spread as real ones do; others are zeros."""


_OPAQUE = ("mkldnn_rnn_layer", "cudnn_rnn", "miopen_rnn")
"""Kernels whose forward hands their backward memory that only they can read: made up, it crashes the process."""


def runs_alone(node: fx.Node | None, *, in_place: bool = False) -> bool:
    """Whether an operation is one that can be called with made-up arguments, which it may overwrite if ``in_place``."""
    if node is None or not isinstance(node.target, OpOverload) or is_opaque(node.target):
        return False
    return in_place or not mutates(node)


def is_opaque(operator: Any) -> bool:
    """Whether an operator makes memory for its own backward whose size and contents no fake tensor knows."""
    return any(name in str(operator) for name in _OPAQUE)


def signature(node: fx.Node) -> str:
    """Describe a call: operator, layouts and element types of its tensors, all other arguments.

    Two calls of the same signature run the same kernels.
    """

    def described(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return "+".join(
                f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{list(t.stride())}/{t.untyped_storage().nbytes()}"
                for t in tensors_of(argument)
            )
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(map(described, argument))}]"
        return repr(argument)

    described_arguments = [*map(described, node.args), *(f"{k}={described(v)}" for k, v in node.kwargs.items())]
    return f"{node.target}({', '.join(described_arguments)})"


def arguments(node: fx.Node, device: torch.device) -> tuple[Any, Any]:
    """Make real tensors in place of the fake ones that an operation was traced with: ones, and valid indices."""
    fake = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    bound = _INDEX_BOUND.get(node.target)  # type: ignore[call-overload]
    below = int(bound(fake[0])) if bound else 1

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, FakeTensor):
            return leaf
        elements = leaf.untyped_storage().nbytes() // leaf.element_size()
        where = device if leaf.device.type != "cpu" or device.type == "cpu" else leaf.device
        if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            flat = torch.ones(elements, dtype=leaf.dtype, device=where)
        elif below > 1 and leaf.dtype in (torch.int64, torch.int32):
            # A stride that shares no factor with most bounds visits rows in no order that a cache would like.
            flat = (torch.arange(elements, dtype=torch.int64, device=where) * 7919 % below).to(leaf.dtype)
        else:
            flat = torch.zeros(elements, dtype=leaf.dtype, device=where)
        return flat.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())

    args, kwargs = pytree.tree_map(real, fake)
    return args, kwargs
