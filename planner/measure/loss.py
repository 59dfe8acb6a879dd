"""What a loss outside the captured graph needs, found on fake tensors, and of its kernels by trying them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.capture.autograd_accumulation import EngineSums
from planner.capture.failures import in_one_line
from planner.capture.inputs import Inputs, LossFunction, differentiable_in, state_of
from planner.capture.joint_capture import fake_mode, is_fake, mode_of
from planner.capture.put_back import put_back
from planner.capture.storages import Run, StepRecorder
from planner.capture.torch_internals import FakeTensor, FakeTensorMode, call_implementation, other_state
from planner.common.units import round_up
from planner.errors import PlannerError, UsageError
from planner.ir.static_memory import LossMemory
from planner.measure import workspace
from planner.measure.devices import device_here, device_spec


@dataclass(frozen=True)
class _Followed:
    """A loss as it ran: what its outputs are, what it gives them, and what stays."""

    recorder: StepRecorder[Run]
    leaves: list[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]
    held_bytes: tuple[int, ...]


def memory_of(model: nn.Module, inputs: Inputs, loss_fn: LossFunction, device: str | None = None) -> LossMemory:
    """Measure ``loss_fn(output)`` and its backward up to the gradient of the output, in eager mode.

    Without data where model and loss allow that, else by running them once. Its kernels are tried one by one if the
    device that is planned for is here: the one of that name, or the one that the model is on. Raises UsageError if the
    model or the loss function fails, or that gives no scalar.
    """
    followed = _followed(model, inputs, loss_fn)
    recorder, gradients = followed.recorder, followed.gradients
    spec = device_spec(model, device)
    aligned = partial(round_up, unit=spec.alignment_bytes)
    for storage in recorder.storages:
        storage.size_bytes = aligned(storage.size_bytes)
    handed_over = sum(aligned(g.untyped_storage().nbytes()) for g in gradients if g is not None)
    held_bytes = sum(map(aligned, followed.held_bytes))
    here = device_here(model, spec)
    nodes = [run.node for run in recorder.events]
    workspace_bytes = workspace.of_calls(nodes, here, workspace.effort_for(model)) if here else [0] * len(nodes)
    working_bytes = max(0, _peak_bytes(recorder, workspace_bytes) - handed_over - held_bytes)
    outputs = tuple((tuple(t.shape), g is not None) for t, g in zip(followed.leaves, gradients, strict=True))
    return LossMemory(working_bytes=working_bytes, held_bytes=held_bytes, is_known=True, outputs=outputs)


def _followed(model: nn.Module, inputs: Inputs, loss_fn: LossFunction) -> _Followed:
    try:
        return _follow_without_data(model, inputs, loss_fn)
    except PlannerError:
        raise
    except Exception as error:
        if is_fake(model):
            raise _failed(error) from error
    try:
        with put_back(model):
            # What the model saves waits on the host: without a plan it may not fit the device.
            with torch.enable_grad(), torch.autograd.graph.save_on_cpu():
                outputs = call_implementation(model)(*inputs.args, **inputs.kwargs)
            return _follow(fake_mode(), outputs, (inputs.args, inputs.kwargs, list(state_of(model).values())), loss_fn)
    except PlannerError:
        raise
    except Exception as error:
        raise _failed(error) from error


def _failed(error: Exception) -> UsageError:
    return UsageError(f"loss_fn fails on the model's output: {in_one_line(error)}")


def _follow_without_data(model: nn.Module, inputs: Inputs, loss_fn: LossFunction) -> _Followed:
    state = dict(chain(model.named_parameters(), model.named_buffers()))
    mode = mode_of([*state.values(), *inputs.tensors()])

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    fakes = inputs.map_tensors(fake)
    with put_back(model), mode:
        with torch.enable_grad(), other_state(model, {n: fake(t) for n, t in state.items()}):
            outputs = call_implementation(model)(*fakes.args, **fakes.kwargs)
        return _follow(mode, outputs, (fakes.args, fakes.kwargs, list(state.values())), loss_fn)


def _follow(mode: FakeTensorMode, outputs: Any, resident: Any, loss_fn: LossFunction) -> _Followed:
    leaf = cache(lambda t: t.detach().requires_grad_(t.requires_grad))  # one for what is returned twice
    outputs = pytree.tree_map_only(torch.Tensor, leaf, outputs)
    leaves = differentiable_in(outputs)
    sums = EngineSums(leaves[0].device if leaves else torch.device("cpu"))
    recorder = StepRecorder[Run](mode, sums, (outputs, resident))
    with recorder, torch.enable_grad():
        value = loss_fn(outputs)
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            raise UsageError("loss_fn must give a scalar tensor")
        sums.watch([value])
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        # Autograd holds the gradient that it starts from as long as the loss is held.
        held_bytes = recorder.size_bytes(value), value.element_size()
        recorder.finish()
    return _Followed(recorder, leaves, gradients, held_bytes)


def _peak_bytes(recorder: StepRecorder[Run], workspace_bytes: Sequence[int]) -> int:
    changes = [0] * (len(recorder.events) + 1)
    for storage in recorder.storages:
        changes[storage.maker] += storage.size_bytes
        if storage.died is not None:
            changes[storage.died] -= storage.size_bytes
    return max(map(sum, zip(accumulate(changes), workspace_bytes, strict=False)), default=0)
