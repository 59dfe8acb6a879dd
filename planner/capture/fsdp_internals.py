"""How ``fully_shard`` was told to shard a model, as far as that decides what a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo


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
    units = (module for module in model.modules() if isinstance(module, FSDPModule))
    return any(not group.reduce_grads for unit in units for group in _groups(unit._get_fsdp_state()))


def _groups(state: Any) -> list[Any]:
    """Return a unit's parameters; up to torch 2.12 it has one group of them, or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]
