"""Hooks, settings and DDP wrappers that change a module's step; private torch APIs, tried by tests/capture."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as all_modules
from torch.nn.parallel import DistributedDataParallel

_OWN = __name__.partition(".")[0]

_NO_SETTINGS = frozenset({"_parameters", "_buffers", "_compiled_call_impl"})
"""Attributes of a module that are what trains or is saved, and its call."""

_CONTAINERS = frozenset({dict, OrderedDict, list, set, deque})

_HOOKS_ON_ALL: tuple[dict[int, Any], ...] = (
    all_modules._global_forward_pre_hooks,
    all_modules._global_forward_hooks,
    all_modules._global_backward_pre_hooks,
    all_modules._global_backward_hooks,
)


def switches_and_sizes(model: nn.Module) -> tuple[int, ...]:
    """Return the mode of every module and the bytes of what it holds, below zero for a parameter that does not train.

    It is asked in every step, so it makes no names.
    """
    found: list[int] = []
    seen: set[nn.Module] = set()
    pending: list[nn.Module | None] = [model]
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


def tensors_held_by(module: nn.Module, *, buffers: bool) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Return what a module itself holds: each tensor with its name, and the table that has it under that."""
    tables: list[dict[str, Any]] = [module._parameters, *([module._buffers] if buffers else [])]
    return ((table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds beside its call and what trains or is saved: mode, numbers, parts, hooks, lists.

    It is asked in every step. Containers are copied: what is written into them later is not seen.
    """
    return {name: _copied(value) for name, value in vars(module).items() if name not in _NO_SETTINGS}


def lend(module: nn.Module, settings: Mapping[str, Any]) -> Callable[[], None]:
    """Let a module hold other settings, of which it gets copies; what is returned gives it back its own."""
    held = vars(module)
    own = {name: value for name, value in held.items() if name not in _NO_SETTINGS}
    _hold(held, {name: _copied(value) for name, value in settings.items()})
    return partial(_hold, held, own)


def _hold(held: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for name in held.keys() - settings.keys() - _NO_SETTINGS:
        del held[name]
    held.update(settings)


def _copied(value: Any) -> Any:
    """Return a copy of a container, and anything else as it is."""
    return value.copy() if type(value) in _CONTAINERS else value


def hooks_on_all_modules() -> tuple[int, ...]:
    """Return the numbers of the hooks that run around every module, those for gradients too: guards see none of them.

    Torch gives no number twice. Hooks of the planner itself, which only look on, are left out.
    """
    numbered = (pair for hooks in _HOOKS_ON_ALL for pair in hooks.items())
    return tuple(n for n, hook in numbered if str(getattr(hook, "__module__", "")).partition(".")[0] != _OWN)


def has_full_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks wait for the gradients of a module's inputs and outputs."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp:
    """How DDP was told to treat gradients, and what it finds of them, as a call of the model begins."""

    ranks: int
    has_views: bool
    """Whether gradients are views into its buckets once they were sent (``gradient_as_bucket_view``)."""
    sends: bool
    """Whether this backward sends them; not within ``no_sync``."""
    finds_gradients: bool
    """Whether gradients of earlier backwards are there."""
    finds_views: bool
    """Whether these are views into the buckets."""
    has_hooks: bool
    """Whether hooks send gradients, which may hold what they like."""


def ddp_around(model: nn.Module) -> Ddp | None:
    """Describe the DDP that is calling a model; None if there is none."""
    ddp: Any = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if ddp is None or not any(module is model for module in ddp.modules()):
        return None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return Ddp(
        ranks=ddp.process_group.size(),
        has_views=bool(ddp.gradient_as_bucket_view),
        sends=bool(ddp.require_backward_grad_sync),
        finds_gradients=bool(gradients),
        finds_views=bool(ddp.gradient_as_bucket_view) and any(map(_is_in_bucket, gradients)),
        has_hooks=bool(ddp._comm_hooks),
    )


def _is_in_bucket(gradient: torch.Tensor) -> bool:
    """Whether a gradient is a part of a flat buffer; one that has a bucket by itself is not known from its own."""
    base = gradient._base
    return base is not None and base.dim() == 1 and base.untyped_storage().nbytes() > gradient.nbytes
