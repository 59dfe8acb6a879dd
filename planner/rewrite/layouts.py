"""Kernels that read a gradient as if it were laid out as what it belongs to, and compute wrong numbers if it is not.

In eager, derivatives copy such a gradient first. In a captured step tracing settled whether to, by the layouts that it
saw; where a step's own differ all the same, the copy is made here.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def group_norm_backward(gradient: torch.Tensor, x: torch.Tensor, *others: Any) -> Any:
    """Compute GroupNorm's backward of a gradient of any layout; CPU kernels up to torch 2.13 do not look at it."""
    layouts = zip(x.shape, gradient.stride(), x.stride(), strict=True)
    if any(size > 1 and own != wanted for size, own, wanted in layouts):
        gradient = torch.empty_like(x).copy_(gradient)
    return aten.native_group_norm_backward.default(gradient, x, *others)


OF_ANY_LAYOUT: dict[Any, Any] = {aten.native_group_norm_backward.default: group_norm_backward}
"""What is called in place of an operator."""
