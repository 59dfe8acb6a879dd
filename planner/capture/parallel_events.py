"""What FSDP2 and DDP do beside a recorded step: when sharded units begin and end, gradients that are kept or sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from planner.capture.sharding import WHOLE, Unit
from planner.capture.storages import StorageRecorder
from planner.capture.torch_internals import is_spread
from planner.capture.trees import leaf_tensors, mapped

Turn = Callable[[str, bool], None]
"""Told by the path of a unit that its forward, or its backward, begins (True) or ends."""


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
        """Run the forward of one of the unit's modules, and record when its forward and backward begin and end.

        The backward of a unit begins with the first gradient of what it gave, and is over with those of all that it
        was given, as FSDP2's hooks have it.
        """
        if self.is_first(module):
            turn(self.path, True)
            args, kwargs = self._told_at_end(turn, (args, kwargs))
        result = run(*args, **kwargs)
        if self.is_last(module):
            turn(self.path, False)
            begun: list[bool] = []

            def begins(_gradient: Any) -> None:
                if not begun:
                    begun.append(True)
                    turn(self.path, True)

            for tensor in _with_gradients(result):
                tensor.register_hook(begins)  # type: ignore[no-untyped-call]
        return result

    def _told_at_end(self, turn: Turn, tree: Any) -> Any:
        leaves = _with_gradients(tree)
        if not leaves:
            return tree

        def ends() -> None:
            turn(self.path, False)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What a step finds of gradients, and what happens to those that it makes, for parameters by their names."""

    found: frozenset[str] = field(default_factory=frozenset)
    """Parameters that have a gradient of earlier backwards, which autograd adds to."""
    are_in_buckets: bool = False
    """Whether those are views into DDP's buckets, which count already."""
    go_into_buckets: bool = False
    """Whether DDP takes each gradient into its buckets as soon as it is there, and leaves a view."""

    @contextmanager
    def followed(self, recorder: StorageRecorder, parameters: Mapping[str, torch.Tensor]) -> Iterator[list[int]]:
        """Begin and end a recorded step with existing gradients; gives their storages, as made first."""
        found: list[int] = []
        with ExitStack() as stack:
            with recorder.silent():
                for parameter in (parameters[name] for name in sorted(self.found)):
                    parameter.grad = torch.zeros_like(parameter)
                    if self.are_in_buckets:
                        recorder.resident(parameter.grad)
                    else:
                        found.append(recorder.made(parameter.grad, kind="gradient"))
                for parameter in parameters.values():
                    if parameter.requires_grad and parameter.is_leaf and self.go_into_buckets:
                        stack.enter_context(self._take(recorder, parameter))
            yield found

    def _take(self, recorder: StorageRecorder, parameter: torch.Tensor) -> RemovableHandle:
        bucket = torch.zeros_like(parameter)
        recorder.resident(bucket)

        def taken(parameter: torch.Tensor) -> None:
            parameter.grad = bucket

        return parameter.register_post_accumulate_grad_hook(taken)  # type: ignore[no-untyped-call]


def found_by_autograd(model: nn.Module, units: Iterable[Unit] | None, *, accumulates: bool) -> frozenset[str]:
    """Return the parameters that have a gradient of earlier backwards which autograd adds to.

    Where ``units`` are sharded it is the whole gradients of those that keep them, in the type that they come in.
    """
    local = {name for name, p in model.named_parameters() if p.requires_grad and not is_spread(type(p))}
    if units is None:
        return frozenset(local if accumulates else ())
    those = (parameter for unit in units if WHOLE in unit.finds for parameter in unit.trainable)
    return frozenset(parameter.name for parameter in those if not parameter.is_cast_to_be_spread) & local
