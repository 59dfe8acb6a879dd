"""What decides on a module's step beside its code and data; private torch APIs, tried by tests/capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as all_modules

_OWN = __name__.partition(".")[0]

_HOOKS_ON_ALL: tuple[dict[int, Any], ...] = (
    all_modules._global_forward_pre_hooks,
    all_modules._global_forward_hooks,
    all_modules._global_backward_pre_hooks,
    all_modules._global_backward_hooks,
)


def switches_and_sizes(model: torch.nn.Module) -> tuple[int, ...]:
    """Return the mode of every module and the bytes of what it holds, below zero for a parameter that does not train.

    It is asked in every step, so it makes no names.
    """
    found: list[int] = []
    seen: set[torch.nn.Module] = set()
    pending: list[torch.nn.Module | None] = [model]
    while pending:
        module = pending.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        found.append(module.training)
        if module._parameters:
            parameters = (p for p in module._parameters.values() if p is not None)
            found += [p.nbytes if p.requires_grad else ~p.nbytes for p in parameters]
        if module._buffers:
            found += [buffer.nbytes for buffer in module._buffers.values() if buffer is not None]
        if module._modules:
            pending += module._modules.values()
    return tuple(found)


def tensors_held_by(module: torch.nn.Module, *, buffers: bool) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Return what a module itself holds: each tensor with its name, and the table that has it under that."""
    tables: list[dict[str, Any]] = [module._parameters, *([module._buffers] if buffers else [])]
    return ((table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None)


def hooks_on_all_modules() -> tuple[int, ...]:
    """Return the numbers of the hooks that run around every module, those for gradients too: guards see none of them.

    Torch gives no number twice. Hooks of the planner itself, which only look on, are left out.
    """
    return tuple(number for hooks in _HOOKS_ON_ALL for number, hook in hooks.items() if not _is_own(hook))


def _is_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == _OWN


def has_gradient_hooks(module: torch.nn.Module) -> bool:
    """Whether autograd calls hooks with the gradient of a parameter of a module, or once that is added up."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters())


def has_full_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks wait for the gradients of a module's inputs and outputs."""
    return bool(module._backward_hooks or module._backward_pre_hooks)
