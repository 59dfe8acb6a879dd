"""Dropout with the bits of eager on a CPU.

Eager multiplies with a mask that it has divided by the share kept. Torch's fused operator, whose mask takes a byte,
multiplies with that share's inverse. The two round differently: in 16 bits gradients differ, and where the inverse
itself does (a share of 0.85 in 32 bits), results too.
"""

from __future__ import annotations

from typing import Any

import torch

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
