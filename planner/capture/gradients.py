"""What becomes of a step's gradients where several ranks train, beside how FSDP2 shards them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from planner.capture.sharding import WHOLE, Unit
from planner.capture.storages import StorageRecorder
from planner.capture.torch_internals import is_spread


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
        """Let a recorded step begin and end so; gives the storages of the gradients that are there, as made first."""
        found: list[int] = []
        with recorder.silent():
            for parameter in (parameters[name] for name in sorted(self.found)):
                parameter.grad = torch.zeros_like(parameter)
                if self.are_in_buckets:
                    recorder.resident(parameter.grad)
                else:
                    found.append(recorder.made(parameter.grad, kind="gradient"))
            hooks = [
                self._take(recorder, parameter)
                for parameter in parameters.values()
                if parameter.requires_grad and parameter.is_leaf and self.go_into_buckets
            ]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def _take(self, recorder: StorageRecorder, parameter: torch.Tensor) -> RemovableHandle:
        bucket = torch.zeros_like(parameter)
        recorder.resident(bucket)

        def taken(parameter: torch.Tensor) -> None:
            parameter.grad = bucket

        hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(taken)  # type: ignore[no-untyped-call]
        return hook


def found_by_autograd(model: nn.Module, units: Iterable[Unit] | None, *, accumulates: bool) -> frozenset[str]:
    """Return the parameters that have a gradient of earlier backwards which autograd adds to.

    Where ``units`` are sharded it is the whole gradients of those that keep them, in the type that they come in.
    """
    local = {name for name, p in model.named_parameters() if p.requires_grad and not is_spread(type(p))}
    if units is None:
        return frozenset(local if accumulates else ())
    those = (parameter for unit in units if WHOLE in unit.finds for parameter in unit.trainable)
    return frozenset(parameter.name for parameter in those if not parameter.is_cast_to_be_spread) & local
