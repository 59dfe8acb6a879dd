"""The one device that a model is on: CUDA's generators, streams and counters are those of the current device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.errors import UsageError


def of_model(model: nn.Module, *arguments: Any) -> torch.device:
    """Return the device of a model's first parameter or buffer, else of a tensor among the arguments; else the CPU."""
    tensor = next(chain(model.parameters(), model.buffers()), None)
    if tensor is None:
        tensor = next((leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)), None)
    return torch.device("cpu") if tensor is None else tensor.device


def entered(device: torch.device) -> AbstractContextManager[Any]:
    """Let a device be CUDA's current one: whatever draws, measures or waits without naming a device means this one."""
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # tensors without data need none
        return nullcontext()
    is_current = torch.cuda.current_device() == device.index  # asked in every step, and mostly so
    return nullcontext() if is_current else torch.cuda.device(device)


def check_one_device(model: nn.Module) -> None:
    """Raise a UsageError for a model over several devices; numbers on the CPU may go with tensors on a GPU."""
    places: dict[torch.device, str] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not tensor.is_meta and (tensor.dim() or tensor.device.type != "cpu"):
            places.setdefault(tensor.device, name)
    if len(places) > 1:
        listed = [f"{name!r} is on {device}" for device, name in places.items()]
        raise UsageError(
            f"the model is spread over several devices: {', '.join(listed)}. A plan is for one: move the model there, "
            "or plan its parts one by one"
        )
