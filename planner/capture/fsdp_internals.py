"""Read how ``fully_shard`` shards a model, and run it unsharded on fake tensors; private torch APIs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, _cast_fp_tensor
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from planner.capture.fake_internals import fake_mode
from planner.capture.sharding import GATHERED, ROOT, SHARES, WHOLE, Found, Parameter, Unit
from planner.capture.torch_internals import other_state


def unplanned_sharding(model: nn.Module, blocks: Iterable[str], ranks: int | None) -> str | None:
    """Describe how a model is sharded if its plan does not count on that; ``blocks`` should be units."""
    for path in blocks:
        if not isinstance(model.get_submodule(path), FSDPModule):
            return f"block {path} is not sharded by itself"
    if not isinstance(model, FSDPModule):
        return "the model itself is not sharded"
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule) and (found := next(_settings(module, ranks), None)):
            return f"{f'block {path}' if path else 'the model'} is sharded {found}"
    return None


def shards_of(model: nn.Module) -> int:
    """Return over how many ranks a sharded model is spread."""
    return max(getattr(group.mesh_info, "shard_mesh_size", 1) for group in _all_groups(model))


def sharded_units(model: nn.Module) -> list[Unit]:
    """Return the units of a sharded model; none of a model that is not sharded."""
    paths = {module: path for path, module in model.named_modules()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for group in _all_groups(model):
        path = paths[group.modules[0]]
        parameters = [(names[id(_registered(one))], one) for one in group.fsdp_params]
        unit = Unit(
            path=path,
            modules=tuple(group.modules),
            parameters=tuple(_as_gathered(name, one, group.mp_policy) for name, one in parameters),
            stays=_stays(group, is_root=path == ROOT),
            copies=isinstance(group.mesh_info, HSDPMeshInfo),
            is_on_host=isinstance(group.offload_policy, CPUOffloadPolicy) and group.device.type != "cpu",
            sends=group.reduce_grads,
            finds=_found(group),
        )
        found.append(unit)
    return found


def gradient_state(model: nn.Module) -> tuple[Any, ...]:
    """Return how each unit treats gradients, and what it finds of earlier steps; it is asked in every step."""
    return tuple((group.reduce_grads, group.reshard_after_backward, _found(group)) for group in _all_groups(model))


def _found(group: Any) -> Found:
    """Return the gradients of a unit that earlier steps have left."""
    found = set()
    if group.is_unsharded:
        found.add(GATHERED)
    if any(one.sharded_param.grad is not None for one in group.fsdp_params):
        found.add(SHARES)
    wholes = (getattr(one, "_unsharded_param", None) for one in group.fsdp_params)
    if any(whole is not None and whole.grad is not None for whole in wholes) or any(
        one.unsharded_accumulated_grad is not None for one in group.fsdp_params
    ):
        found.add(WHOLE)
    return frozenset(found)


def _stays(group: Any, *, is_root: bool) -> bool:
    """Whether parameters stay gathered after the forward; the root's do where nobody says anything."""
    if group.post_forward_mesh_info is None:
        return True
    return is_root and bool(getattr(group.modules[0]._get_fsdp_state(), "_auto_reshard_after_forward", True))


def _as_gathered(name: str, one: Any, policy: Any) -> Parameter:
    own, first = one.sharded_param.dtype, one.fsdp_placement.dim
    size = tuple(one._orig_size)
    computed = policy.param_dtype if own.is_floating_point else None
    return Parameter(
        name=name,
        shape=(size[first], *size[:first], *size[first + 1 :]) if size else (),
        item_bytes=(computed or own).itemsize,
        share_item_bytes=own.itemsize,
        spread_item_bytes=(policy.reduce_dtype or computed or own).itemsize,
        trainable=one.sharded_param.requires_grad,
    )


def shares_layers(model: nn.Module) -> bool:
    """Whether ranks share layers of a sharded model (``parallelize_module`` before ``fully_shard``)."""
    return any(one.is_dtensor for group in _all_groups(model) for one in group.fsdp_params)


def settings_of(model: nn.Module, blocks: Collection[str]) -> str:
    """Describe units of a sharded model with settings that differ from the defaults; ``""`` if there are none."""
    said = []
    for unit in sharded_units(model):
        name = f"block {unit.path}" if unit.path in blocks else unit.path or "the model"
        if unit.path != ROOT and unit.path not in blocks:
            said.append(f"{name} is sharded as a unit of its own")
        if unit.stays != (unit.path == ROOT):
            said.append(f"{name} is sharded with reshard_after_forward={not unit.stays}")
        if unit.copies:
            said.append(f"{name} is sharded over a mesh that also copies it (HSDP)")
        if unit.is_on_host:
            said.append(f"{name} is sharded with a CPUOffloadPolicy")
        if not unit.sends:
            said.append(f"gradients of {name} stay whole until a later backward (set_requires_gradient_sync)")
    return "; ".join(said)


def computes_in_other_types(model: nn.Module) -> bool:
    """Whether parameters of a sharded model are gathered in other types than those of its shares."""
    return any(p.item_bytes != p.share_item_bytes for unit in sharded_units(model) for p in unit.parameters)


def _registered(one: Any) -> nn.Parameter:
    """Return what a module has as a parameter of ``fully_shard`` now: its share, the whole, or what stands in."""
    return getattr(one._module_info.module, one._module_info.param_name)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Show a sharded model with whole parameters, without data and without communication.

    Parameters, inputs and outputs have the types that the policy of their unit says.
    """
    whole: dict[int, nn.Parameter] = {}
    with fake_mode():
        for group in _all_groups(model):
            for one in group.fsdp_params:
                own = _registered(one)
                dtype = group.mp_policy.param_dtype if own.is_floating_point() else None
                made = torch.empty(one._orig_size, dtype=dtype or own.dtype, device=group.device)
                whole[id(own)] = nn.Parameter(_shared_by_layers(one, made), own.requires_grad)
    named = model.named_parameters(remove_duplicate=False)
    state = {name: whole[id(parameter)] for name, parameter in named if id(parameter) in whole}
    with ExitStack() as stack:
        for part in model.modules():
            for table, cast in ((part._forward_pre_hooks, _cast_inputs), (part._forward_hooks, _cast_outputs)):
                owners = ((key, _owner(hook)) for key, hook in table.items())
                casts = {key: partial(cast, owner._mp_policy) for key, owner in owners if owner is not None}
                stack.enter_context(patch.dict(table, casts))
        stack.enter_context(other_state(model, state))
        yield


def _shared_by_layers(one: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a gathered parameter as its module sees it: where ranks share the layer, the part of this one."""
    if not one.is_dtensor:
        return local
    attribute = "_unsharded_dtensor_spec" if hasattr(one, "_unsharded_dtensor_spec") else "_tp_spec"  # up to torch 2.12
    spec = getattr(one, attribute)
    with torch.no_grad():
        return DTensor.from_local(local, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)


def _owner(hook: Any) -> FSDPState | None:
    """Return the owner of a hook; a group of modules shares one wrapper."""
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
    return tree if dtype is None else pytree.tree_map(partial(_cast_fp_tensor, dtype), tree)


def _settings(block: FSDPModule, ranks: int | None) -> Iterator[str]:
    state = block._get_fsdp_state()
    for group in _groups(state):
        if ranks is not None and (shards := getattr(group.mesh_info, "shard_mesh_size", 1)) != ranks:
            yield f"over {shards} ranks, and was planned for ranks={ranks}"
        if group.post_forward_mesh_info not in (None, group.mesh_info):
            yield "with a larger part than its share after the forward (reshard_after_forward is a number)"
        if not group.reshard_after_backward:
            yield "with parameters that stay gathered after the backward (set_reshard_after_backward)"
        if not group.all_reduce_grads and isinstance(group.mesh_info, HSDPMeshInfo):
            yield "with gradients that are not summed over copies yet (set_requires_all_reduce)"
        if not group.unshard_in_backward:
            yield "with parameters that are not gathered for the backward (set_unshard_in_backward)"
        if getattr(group, "reduce_scatter_max_input_buffers", 1) > 1:  # from torch 2.13 on
            yield "with more buffers for gradients than one (set_reduce_scatter_max_input_buffers)"
    if state._states_to_forward_prefetch or state._states_to_backward_prefetch:
        yield "with prefetching of its own (set_modules_to_forward_prefetch, set_modules_to_backward_prefetch)"
    if not state._state_ctx.is_last_backward:
        yield "with more backwards to come (set_is_last_backward)"


def _all_groups(model: nn.Module) -> list[Any]:
    """Return the parameters of all units, each unit's once."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = {id(state): state for state in (unit._get_fsdp_state() for unit in units)}
    return [group for state in states.values() for group in _groups(state)]


def _groups(state: Any) -> list[Any]:
    """Return a unit's parameters; up to torch 2.12 it has one group of them, or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]
