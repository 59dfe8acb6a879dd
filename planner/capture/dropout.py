"""Dropout with the bits of eager on a CPU.

Eager multiplies with a mask that it has divided by the share kept. Torch's fused operator, whose mask takes a byte,
multiplies with that share's inverse. The two round differently: in 16 bits gradients differ, and where the inverse
itself does (a share of 0.85 in 32 bits), results too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from planner.capture.target_device import is_for_target_device
from planner.capture.torch_internals import outside_tracing

aten = torch.ops.aten

_16_BITS = 2
"""Bytes of an element."""


def dropout(x: torch.Tensor, p: Any, train: bool) -> torch.Tensor:
    """Drop as a step is to be traced; where nothing is dropped give what came, as eager does, and not a copy of it."""
    if not train or not p:
        return x
    if x.device.type == "cpu" and not is_for_target_device() and isinstance(p, float) and p < 1:
        with outside_tracing():
            scale = torch.ones((), dtype=x.dtype).div_(1 - p).item()
            is_as_eager = scale == torch.tensor(1 / (1 - p), dtype=x.dtype).item()
        if not is_as_eager:
            return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
        if x.dtype.itemsize == _16_BITS:
            rounded: torch.Tensor = _Dropout.apply(x, p, scale)  # type: ignore[no-untyped-call]
            return rounded
    dropped: torch.Tensor = aten.native_dropout(x, p, train)[0]
    return dropped


class _Dropout(torch.autograd.Function):
    """The fused operator, whose gradients are scaled by a number that was rounded as eager's mask is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, scale: float) -> torch.Tensor:
        dropped: torch.Tensor
        dropped, mask = aten.native_dropout(x, p, True)
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return dropped

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return aten.native_dropout_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


_FUSED_BACKWARD = aten.native_dropout_backward.default

_WORTH_IT = 2**14
"""Elements: with fewer, what is called besides takes longer than the kernel."""


def kernel_of(node: fx.Node) -> Any:
    """Return what a planned graph calls for a node: its operator, or for dropout what computes the same bits with less.

    A CPU's fused operators multiply floats with booleans, which takes four times as long as floats with floats, and a
    copy of the mask in floats. What is called does not depend on sizes, so that one code serves all.
    """
    function = _WITH_LESS.get(node.target)
    x = node.args[0].meta["val"] if function is not None and isinstance(node.args[0], fx.Node) else None
    return node.target if x is None or x.device.type != "cpu" or x.dtype is not torch.float32 else function


def _drop(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw integers where the result is to be, and make floats of them in place: that takes no more memory."""
    if not (train and 0 < p < 1 and x.numel() >= _WORTH_IT and x.is_contiguous()):
        return torch.native_dropout(x, p, train)
    dropped = torch.empty_like(x)
    drawn = dropped.view(torch.int32).bernoulli_(1 - p)
    mask = drawn.to(torch.bool)
    return dropped.copy_(drawn).mul_(1 / (1 - p)).mul_(x), mask


def _drop_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    if gradient.numel() < _WORTH_IT or not (gradient.is_contiguous() and mask.is_contiguous()):
        given: torch.Tensor = _FUSED_BACKWARD(gradient, mask, scale)
        return given
    return mask.view(torch.uint8).to(gradient.dtype).mul_(scale).mul_(gradient)


_WITH_LESS: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _drop,
    aten.native_dropout_backward.default: _drop_backward,
}
