"""How ``fully_shard`` was told to shard a model, as far as that decides what a rank holds, and the model without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils import _pytree as pytree

from planner.capture.joint_capture import fake_mode
from planner.capture.torch_internals import other_state


def unplanned_sharding(model: nn.Module, blocks: Iterable[str], ranks: int) -> str | None:
    """Say how a model is sharded, if that is otherwise than its plan counts on."""
    for path in blocks:
        block = model.get_submodule(path)
        if not isinstance(block, FSDPModule):
            return f"block {path} is not sharded by itself"
        if found := next(_settings(block, ranks), None):
            return f"block {path} is sharded {found}"
    if keeps_whole_gradients(model):
        return "gradients stay whole until a later backward (set_requires_gradient_sync)"
    return None


def shards_of(model: nn.Module) -> int:
    """Return over how many ranks a sharded model is spread."""
    return max(getattr(group.mesh_info, "shard_mesh_size", 1) for group in _all_groups(model))


def types_of_shares(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Return the types of a rank's share of each parameter, and of its gradient while that is sent, by its names.

    A model that is not sharded has none.
    """
    found: dict[int, tuple[torch.dtype, torch.dtype]] = {}
    for group in _all_groups(model):
        for one in group.fsdp_params:
            own, policy = one.sharded_param.dtype, group.mp_policy
            spread = policy.reduce_dtype or policy.param_dtype or own
            found[id(_registered(one))] = own, spread
    named = model.named_parameters(remove_duplicate=False)
    return {name: found[id(parameter)] for name, parameter in named if id(parameter) in found}


def computes_in_other_types(model: nn.Module) -> bool:
    """Whether parameters of a sharded model are gathered in other types than those of its shares."""
    return any(
        one.sharded_param.is_floating_point() and group.mp_policy.param_dtype not in (None, one.sharded_param.dtype)
        for group in _all_groups(model)
        for one in group.fsdp_params
    )


def _registered(one: Any) -> nn.Parameter:
    """Return what a module has as a parameter of ``fully_shard`` now: its share, the whole, or what stands in."""
    found: nn.Parameter = getattr(one._module_info.module, one._module_info.param_name)
    return found


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Let a sharded model be as its own code sees it: whole parameters, without data, and nothing is communicated.

    Parameters, inputs and outputs have the types that the policy of their unit says.
    """
    whole: dict[int, nn.Parameter] = {}
    with fake_mode():
        for group in _all_groups(model):
            for one in group.fsdp_params:
                own = _registered(one)
                dtype = group.mp_policy.param_dtype if own.is_floating_point() else None
                made = torch.empty(one._orig_size, dtype=dtype or own.dtype, device=group.device)
                whole[id(own)] = nn.Parameter(made, own.requires_grad)
    named = model.named_parameters(remove_duplicate=False)
    state = {name: whole[id(parameter)] for name, parameter in named if id(parameter) in whole}
    hooks = [table for part in model.modules() for table in (part._forward_pre_hooks, part._forward_hooks)]
    kept = [(table, dict(table)) for table in hooks]
    for part in model.modules():
        for key, hook in part._forward_pre_hooks.items():
            if (owner := _owner(hook)) is not None:
                part._forward_pre_hooks[key] = partial(_cast_inputs, owner._mp_policy)
        for key, hook in part._forward_hooks.items():
            if (owner := _owner(hook)) is not None:
                part._forward_hooks[key] = partial(_cast_outputs, owner._mp_policy)
    try:
        with other_state(model, state):
            yield
    finally:
        for table, before in kept:
            table.update(before)


def _owner(hook: Any) -> FSDPState | None:
    """Return whose hook it is; a group of modules shares one that wraps its own."""
    while hook is not None:
        if isinstance(owner := getattr(hook, "__self__", None), FSDPState):
            return owner
        hook = getattr(hook, "__wrapped__", None)
    return None


def _cast_inputs(policy: Any, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    return _cast(dtype, args), _cast(dtype, kwargs)


def _cast_outputs(policy: Any, _module: nn.Module, _args: Any, output: Any) -> Any:
    return _cast(policy.output_dtype, output)


def _cast(dtype: torch.dtype | None, tree: Any) -> Any:
    if dtype is None:
        return tree
    cast: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    return pytree.tree_map_only(torch.Tensor, cast, tree)


def _settings(block: FSDPModule, ranks: int) -> Iterator[str]:
    state: Any = block._get_fsdp_state()
    if state._states_to_forward_prefetch or state._states_to_backward_prefetch:
        yield "with prefetching of its own"
    for group in _groups(state):
        if isinstance(group.mesh_info, HSDPMeshInfo):
            yield "over a mesh that also copies it (HSDP)"
        if (shards := getattr(group.mesh_info, "shard_mesh_size", 1)) != ranks:
            yield f"over {shards} ranks, and was planned for ranks={ranks}"
        if group.post_forward_mesh_info is None:
            yield "with reshard_after_forward=False"
        elif group.post_forward_mesh_info != group.mesh_info:
            yield "with a number of ranks as reshard_after_forward"
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            yield "with a CPUOffloadPolicy"


def keeps_whole_gradients(model: nn.Module) -> bool:
    """Whether a sharded model is told to keep its gradients whole, to send them in a later backward."""
    return any(not group.reduce_grads for group in _all_groups(model))


def _all_groups(model: nn.Module) -> list[Any]:
    """Return the parameters of all units, each unit's once."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = {id(state): state for state in (unit._get_fsdp_state() for unit in units)}
    return [group for state in states.values() for group in _groups(state)]


def _groups(state: Any) -> list[Any]:
    """Return a unit's parameters; up to torch 2.12 it has one group of them, or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]
