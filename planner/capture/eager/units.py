"""When the units of a sharded model begin and end, in its forward and in its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from planner.capture.trees import leaf_tensors


class UnitCalls:
    """A unit of FSDP2, by the path of its first module, and which of its modules still are to run."""

    def __init__(self, path: str, modules: Sequence[nn.Module]) -> None:
        self.path, self.modules = path, modules
        self._left: set[nn.Module] = set()

    def is_first(self, module: nn.Module) -> bool:
        """Whether the call of a module is the first of the unit's."""
        if not self._left:
            self._left = set(self.modules)
            return True
        return module not in self._left

    def is_last(self, module: nn.Module) -> bool:
        """Whether the call of a module was the last of the unit's."""
        self._left.discard(module)
        return not self._left


class Told(torch.autograd.Function):
    """Passes tensors on, and tells when all of them have their gradients."""

    @staticmethod
    def forward(ctx: Any, ends: Callable[[], None], *tensors: torch.Tensor) -> Any:
        """Pass tensors on."""
        ctx.ends = ends
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Tell, and pass gradients on."""
        ctx.ends()
        return (None, *gradients)


def with_gradients(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree that have gradients."""
    return [tensor for tensor in leaf_tensors(tree) if tensor.requires_grad]
