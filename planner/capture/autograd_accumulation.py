"""What autograd does with gradients: which sums it makes in place, and which it copies at the end.

Where a value is used several times, autograd's engine adds the gradients that come from its uses. It adds into the
first where nobody else holds that (``can_accumulate_inplace`` of torch's ``input_buffer.cpp``), and never while a
dispatch mode watches. So a recorded step would show a new tensor for each such sum, that a step of its own lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import set_detect_anomaly
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.torch_internals import (
    is_called_by_engine,
    is_dense,
    references,
    storage_id,
    takes_boxed_gradients,
)

aten = torch.ops.aten


def is_copied(of: torch.Tensor, gradient: torch.Tensor, taken: set[int]) -> bool:
    """Whether a gradient is copied at the end: its storage is taken (as it is from now on), or otherwise laid out."""
    same_layout = of.stride() == gradient.stride() or min(of.numel(), gradient.numel()) <= 1
    is_taken = storage_id(gradient) in taken
    taken.add(storage_id(gradient))
    return is_taken or not same_layout


class EngineSums:
    """Follows a backward, and knows the engine's sums from those within a derivative."""

    def __init__(self, device: torch.device) -> None:
        """Get ready; to be called in the mode in which the step will run, and before it is watched."""
        self._is_between = False
        self._alone = _references_alone(device)
        """How often a tensor and its storage are referred to that the engine alone holds."""

    def watch(self, outputs: Sequence[torch.Tensor]) -> None:
        """Follow the backward of some outputs."""
        pending = [output.grad_fn for output in outputs]
        seen = set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if takes_boxed_gradients(node):
                # A hook would hold the gradients while it runs. What it runs is called by Python, so it is between.
                self._is_between = True
            else:
                node.register_prehook(self._begins)
                node.register_hook(self._ended)
            pending += [following for following, _ in node.next_functions]

    def is_in_place(self, function: Any, args: Sequence[Any]) -> bool:
        """Whether a call that is being dispatched is a sum that the engine would make in place, were it not watched.

        To be asked by ``__torch_dispatch__`` itself: who called that says whether it was the engine.
        """
        if not self._is_between or function is not aten.add.Tensor or not is_called_by_engine(2):
            return False
        held, added = args
        is_alike = (held.shape, held.dtype) == (added.shape, added.dtype)
        return is_alike and is_dense(held) and references(held) == self._alone

    def _begins(self, *_gradients: Any) -> None:
        self._is_between = False

    def _ended(self, *_gradients: Any) -> None:
        self._is_between = True


class _Probe(TorchDispatchMode):
    """Notes how often the first summand is referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[int, int] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.add.Tensor and is_called_by_engine(1):
            self.seen = references(args[0])
        return function(*args, **(kwargs or {}))


def _references_alone(device: torch.device) -> tuple[int, int] | None:
    """Sum two gradients that nobody else holds, and see how often the first is referred to."""
    x = torch.ones(2, 2, device=device, requires_grad=True)
    # Hooks of its own: those around this, of a checkpoint say, are not to see what is saved here.
    own_hooks, probe = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), _Probe()
    with torch.enable_grad(), own_hooks, set_detect_anomaly(False), probe:
        value = x * 2
        torch.autograd.backward([(value.sin() * value.cos()).sum()])
    return probe.seen
