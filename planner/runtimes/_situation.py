"""What decides, apart from data, which plan a call needs; asked in every step, so it is quick to find."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.capture.hugging_face import masking_of
from planner.capture.inputs import Inputs
from planner.capture.torch_internals import training_switches


def situation_of(model: nn.Module, inputs: Inputs) -> Any:
    """Return all that a step's plan depends on, as far as it can change between calls: two are equal or not."""
    leaves = pytree.tree_leaves((inputs.args, inputs.kwargs))
    described = tuple(
        (x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in leaves
        if isinstance(x, (torch.Tensor, bool, str))
    )
    kind = next((x.device.type for x in leaves if isinstance(x, torch.Tensor)), "cpu")
    cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return described, cast, training_switches(model), masking_of(model, inputs)
