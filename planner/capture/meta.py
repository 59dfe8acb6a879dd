"""Models on the meta device: built without memory, to be sharded first and allocated after that.

Such a model is planned as it will be, on tensors without data that are where it is going.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from planner.capture.inputs import Inputs, state_of
from planner.capture.joint_capture import fake_mode
from planner.capture.torch_internals import other_state


@contextmanager
def placed(model: nn.Module, inputs: Inputs) -> Iterator[Inputs]:
    """Let a model on the meta device be where its other inputs are, else on an accelerator, else on the CPU.

    Gives the inputs, those on the meta device placed too. The model has its own tensors back when the context ends.
    Inputs on the meta device for a model that is not there are left alone: they are a mistake, and checked elsewhere.
    """
    if not any(tensor.is_meta for tensor in state_of(model).values()):
        yield inputs
        return
    on_meta = {id(t): t for t in (*state_of(model).values(), *inputs.tensors()) if t.is_meta}
    device = next((t.device for t in inputs.tensors() if not t.is_meta), None) or _accelerator()
    with fake_mode():
        there = {key: _like(tensor, device) for key, tensor in on_meta.items()}
    state = {name: there[id(tensor)] for name, tensor in state_of(model).items() if id(tensor) in there}
    with other_state(model, state):
        yield inputs.map_tensors(lambda tensor: there.get(id(tensor), tensor))


def _accelerator() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
