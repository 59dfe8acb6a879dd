"""What a loss outside the captured graph needs, found on fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.capture import fake_mode
from planner.errors import PlannerError, UsageError
from planner.inputs import Inputs
from planner.memory import StorageTracker
from planner.surroundings import LossMemory
from planner.torch_internals import FakeTensor, call_with


def memory_of(model: nn.Module, inputs: Inputs, loss_fn: Callable[[Any], torch.Tensor]) -> LossMemory:
    """Measure a loss in eager mode without running anything.

    Parameters
    ----------
    model : torch.nn.Module
    inputs : Inputs
    loss_fn : callable
        From the model's output to a scalar.

    Returns
    -------
    LossMemory
        That of ``loss_fn(output)`` and of its backward up to the gradient of the output.

    Raises
    ------
    UsageError
        If the loss function fails or gives no scalar.
    """
    state = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    known = [t for t in [*state.values(), *inputs.tensors()] if isinstance(t, FakeTensor)]
    mode = known[0].fake_mode if known else fake_mode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    fakes = inputs.map_tensors(fake)
    try:
        with mode:
            with torch.no_grad():
                own = {n: fake(t) for n, t in state.items()}
                outputs = call_with(model, own, *fakes.args, **fakes.kwargs)
            outputs = pytree.tree_map_only(torch.Tensor, _as_leaf, outputs)
            leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
            tracker = StorageTracker(alignment_bytes=1)
            tracker.ignore((outputs, fakes.args, fakes.kwargs, list(state.values())))
            with tracker:
                value = loss_fn(outputs)
                if not isinstance(value, torch.Tensor) or value.dim() != 0:
                    raise UsageError("loss_fn must give a scalar tensor")
                gradients = torch.autograd.grad(value, leaves, allow_unused=True)
            # Autograd holds the gradient that it starts from as long as the loss is held.
            held_bytes = tracker.bytes_of(value) + value.element_size()
    except PlannerError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(f"loss_fn fails on the model's output: {type(error).__name__}: {first}") from error
    handed_over = sum(g.untyped_storage().nbytes() for g in gradients if g is not None)
    working_bytes = max(0, tracker.peak_bytes - handed_over - held_bytes)
    return LossMemory(working_bytes=working_bytes, held_bytes=held_bytes, is_known=True)


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
