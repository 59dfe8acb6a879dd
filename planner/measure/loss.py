"""What a loss outside the captured graph needs, found on fake tensors, and of its kernels by trying them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.capture.autograd_accumulation import EngineSums
from planner.capture.failures import in_one_line
from planner.capture.inputs import Inputs, tensors_in
from planner.capture.joint_capture import mode_of
from planner.capture.storages import Run, StepRecorder
from planner.capture.torch_internals import FakeTensor, other_state
from planner.errors import PlannerError, UsageError
from planner.ir.static_memory import LossMemory
from planner.measure import workspace
from planner.measure.devices import device_here, device_spec


def memory_of(
    model: nn.Module, inputs: Inputs, loss_fn: Callable[[Any], torch.Tensor], device: str | None = None
) -> LossMemory:
    """Measure ``loss_fn(output)`` and its backward up to the gradient of the output, in eager mode, without running it.

    Its kernels are tried one by one if the device that is planned for is here: the one of that name, or the one that
    the model is on. Raises UsageError if the loss function fails or gives no scalar.
    """
    state = dict(chain(model.named_parameters(), model.named_buffers()))
    mode = mode_of([*state.values(), *inputs.tensors()])

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    fakes = inputs.map_tensors(fake)
    try:
        with mode:
            with torch.no_grad():
                own = {n: fake(t) for n, t in state.items()}
                with other_state(model, own):
                    outputs = model(*fakes.args, **fakes.kwargs)
            outputs = pytree.tree_map_only(
                torch.Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), outputs
            )
            leaves = [t for t in tensors_in(outputs) if t.requires_grad]
            sums = EngineSums(leaves[0].device if leaves else torch.device("cpu"))
            resident = outputs, fakes.args, fakes.kwargs, list(state.values())
            recorder = StepRecorder[Run](mode, sums, resident)
            with recorder:
                value = loss_fn(outputs)
                if not isinstance(value, torch.Tensor) or value.dim() != 0:
                    raise UsageError("loss_fn must give a scalar tensor")
                sums.watch([value])
                gradients = torch.autograd.grad(value, leaves, allow_unused=True)
                # Autograd holds the gradient that it starts from as long as the loss is held.
                held_bytes = recorder.size_bytes(value) + value.element_size()
                recorder.finish()
    except PlannerError:
        raise
    except Exception as error:
        raise UsageError(f"loss_fn fails on the model's output: {in_one_line(error)}") from error
    handed_over = sum(g.untyped_storage().nbytes() for g in gradients if g is not None)
    here = device_here(model, device_spec(model, device))
    nodes = [run.node for run in recorder.events]
    workspace_bytes = workspace.of_calls(nodes, here, workspace.effort_for(model)) if here else [0] * len(nodes)
    peak_bytes = _peak_bytes(recorder, workspace_bytes)
    working_bytes = max(0, peak_bytes - handed_over - held_bytes)
    return LossMemory(working_bytes=working_bytes, held_bytes=held_bytes, is_known=True)


def _peak_bytes(recorder: StepRecorder[Run], workspace_bytes: Sequence[int]) -> int:
    changes = [0] * (len(recorder.events) + 1)
    for storage in recorder.storages:
        changes[storage.maker] += storage.size_bytes
        if storage.died is not None:
            changes[storage.died] -= storage.size_bytes
    return max(map(sum, zip(accumulate(changes), workspace_bytes, strict=False)), default=0)
