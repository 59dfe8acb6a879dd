"""When the units of a sharded model begin and end, in its forward and in its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from planner.capture.trees import leaf_tensors, mapped


class Turn(Protocol):
    """Told when the forward of a unit, or its backward, begins or ends."""

    def __call__(self, unit: str, *, is_entered: bool) -> None:
        """Take note of it."""


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

    def followed(self, turn: Turn, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for the forward of one of its modules, which ``run`` makes, and tell when its turns begin and end.

        The backward of a unit begins with the first gradient of what it gave, and is over with those of all that it
        was given, as FSDP2's hooks have it.
        """
        if self.is_first(module):
            turn(self.path, is_entered=True)
            args, kwargs = self._told_at_end(turn, (args, kwargs))
        result = run(*args, **kwargs)
        if self.is_last(module):
            turn(self.path, is_entered=False)
            begun: list[bool] = []

            def begins(_gradient: Any) -> None:
                if not begun:
                    begun.append(True)
                    turn(self.path, is_entered=True)

            for tensor in _with_gradients(result):
                tensor.register_hook(begins)  # type: ignore[no-untyped-call]
        return result

    def _told_at_end(self, turn: Turn, tree: Any) -> Any:
        leaves = _with_gradients(tree)
        if not leaves:
            return tree

        def ends() -> None:
            turn(self.path, is_entered=False)

        passed = dict(zip(map(id, leaves), Told.apply(ends, *leaves), strict=True))  # type: ignore[no-untyped-call]
        return mapped(lambda tensor: passed.get(id(tensor), tensor), tree)


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


def _with_gradients(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree that have gradients."""
    return [tensor for tensor in leaf_tensors(tree) if tensor.requires_grad]
