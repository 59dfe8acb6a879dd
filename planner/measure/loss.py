"""Memory of a loss outside the captured graph: saved activations and peak, followed on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from planner.capture.autograd_accumulation import EngineSums
from planner.capture.failures import failing_as, in_one_line
from planner.capture.fake_internals import fake_mode
from planner.capture.inputs import Inputs, LossFunction, differentiable_in, state_of
from planner.capture.joint_capture import run_without_data
from planner.capture.model_facts import is_fake, of_model
from planner.capture.state_restore import put_back, written_back
from planner.capture.storages import Run, StepRecorder
from planner.capture.torch_internals import FakeTensorMode, call_implementation
from planner.capture.trees import mapped
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
    spec = device_spec(of_model(model), device)
    aligned = partial(round_up, unit=spec.alignment_bytes)
    for storage in recorder.storages:
        storage.size_bytes = aligned(storage.size_bytes)
    handed_over_bytes = sum(aligned(g.untyped_storage().nbytes()) for g in gradients if g is not None)
    held_bytes = sum(map(aligned, followed.held_bytes))
    here = device_here(of_model(model), spec)
    nodes = [run.node for run in recorder.events]
    effort = workspace.effort_for(is_fake=is_fake(model))
    tried = workspace.of_calls(nodes, here, effort) if here else [None] * len(nodes)
    timeline_bytes = _timeline(recorder, [size_bytes or 0 for size_bytes in tried])
    return LossMemory(
        working_bytes=max(0, max(timeline_bytes, default=0) - handed_over_bytes - held_bytes),
        held_bytes=held_bytes,
        is_known=True,
        outputs=tuple((tuple(t.shape), g is not None) for t, g in zip(followed.leaves, gradients, strict=True)),
    )


def _followed(model: nn.Module, inputs: Inputs, loss_fn: LossFunction) -> _Followed:
    try:
        with run_without_data(model, inputs) as (mode, outputs, resident):
            return _follow(mode, outputs, resident, loss_fn)
    except PlannerError:
        raise
    except Exception as error:
        if is_fake(model):
            raise _failed(error) from error
    written = written_back([*model.parameters(), *inputs.tensors()])
    with failing_as(_failed), put_back(model, inputs), written:
        # What the model saves waits on the host: without a plan it may not fit the device.
        with torch.enable_grad(), torch.autograd.graph.save_on_cpu():
            outputs = call_implementation(model)(*inputs.args, **inputs.kwargs)
        resident = inputs.args, inputs.kwargs, list(state_of(model).values())
        return _follow(fake_mode(), outputs, resident, loss_fn)


def _failed(error: Exception) -> UsageError:
    return UsageError(f"loss_fn fails on the model's output: {in_one_line(error)}")


def _follow(mode: FakeTensorMode, outputs: Any, resident: Any, loss_fn: LossFunction) -> _Followed:
    leaf = cache(lambda t: t.detach().requires_grad_(t.requires_grad))  # one for what is returned twice
    outputs = mapped(leaf, outputs)
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


def _timeline(recorder: StepRecorder[Run], workspace_bytes: Sequence[int]) -> list[int]:
    changes = [0] * (len(recorder.events) + 1)
    for storage in recorder.storages:
        changes[storage.maker] += storage.size_bytes
        if storage.died is not None:
            changes[storage.died] -= storage.size_bytes
    return [*map(sum, zip(accumulate(changes), workspace_bytes, strict=False))]
