"""What torch.distributed has made of a model, and whether there is more than one process."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from planner.capture.ddp_internals import Ddp as Ddp
from planner.capture.ddp_internals import ddp_around as ddp_around
from planner.capture.provenance import kinds_of
from planner.capture.sharding import SHARES, WHOLE
from planner.errors import UsageError
from planner.ir.layers import find_blocks, is_within

if TYPE_CHECKING:
    from planner.capture.fsdp_internals import ShardedUnit

_FSDP = "torch.distributed.fsdp"
"""Takes a while to import: a model is sharded only where somebody has."""


def has_several_ranks() -> bool:
    """Whether torch.distributed is initialised with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` has spread parameters of a model over ranks, and they are spread now."""
    return has_distributed_tensors(model) and has_units(model)


def has_units(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a model or its parts, whatever its parameters are now."""
    if _FSDP not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def units_of(model: nn.Module) -> list[ShardedUnit]:
    """Return what ``fully_shard`` gathers together of a model, whatever its parameters are now; none if it does not."""
    if _FSDP not in sys.modules:
        return []
    from planner.capture.fsdp_internals import sharded_units

    return sharded_units(model)


def shards_of(model: nn.Module) -> int:
    """Return over how many ranks a model is sharded; 1 if it is not."""
    if not has_units(model):
        return 1
    from planner.capture.fsdp_internals import shards_of

    return shards_of(model)


def gradient_state(model: nn.Module) -> Hashable:
    """Return how the call of a model that begins treats gradients, and what it finds of earlier ones.

    Of a model that is neither sharded nor inside DDP there is nothing to say.
    """
    if _FSDP in sys.modules:
        from planner.capture.fsdp_internals import gradient_state

        if state := gradient_state(model):
            return state
    return ddp_around(model)


def finds_gradients(model: nn.Module) -> bool:
    """Whether gradients of earlier backwards are there as the call of a model begins that several ranks train."""
    if units := units_of(model):
        return any(not unit.unit.finds.isdisjoint((WHOLE, SHARES)) for unit in units)
    ddp = ddp_around(model)
    return ddp is not None and ddp.finds_gradients


def unplanned_sharding(model: nn.Module, blocks: Iterable[str], ranks: int | None) -> str | None:
    """Say how a sharded model is, if that is otherwise than a plan counts on."""
    if not has_units(model):
        return None
    from planner.capture.fsdp_internals import unplanned_sharding

    return unplanned_sharding(model, blocks, ranks)


def whole(model: nn.Module) -> AbstractContextManager[None]:
    """Let a sharded model be as its own code sees it: see :func:`planner.capture.fsdp_internals.unsharded`."""
    if not has_units(model):
        return nullcontext()
    from planner.capture.fsdp_internals import unsharded

    return unsharded(model)


def sharded_inside(model: nn.Module) -> str:
    """Name a part of a block that ``fully_shard`` spreads by itself, whose hooks run inside the block; ``""`` if none.

    >>> sharded_inside(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    ''
    """
    if not has_units(model):
        return ""
    from torch.distributed.fsdp import FSDPModule

    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    kinds = kinds_of(model)
    blocks = find_blocks(dict.fromkeys(kinds, 1), kinds)
    return next((unit for unit in units for block in blocks if unit != block and is_within(unit, block)), "")


def shares_layers(model: nn.Module) -> bool:
    """Whether ranks share layers of a model (``parallelize_module``), which may be sharded as well."""
    if not is_sharded(model):
        return has_distributed_tensors(model)
    from planner.capture.fsdp_internals import shares_layers

    return shares_layers(model)


def has_distributed_tensors(model: nn.Module) -> bool:
    """Whether parameters of a model are spread over ranks, by ``fully_shard`` or by ``parallelize_module``."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor  # takes a while to import

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def layers_group(model: nn.Module) -> Any:
    """Return the group of the ranks that share layers of a model with this one; None for all ranks, if it is not one.

    A rank of another group has other data, or another replica of the model.
    """
    from torch.distributed.tensor import DTensor

    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    mesh = meshes.pop()
    return mesh.get_group() if mesh.ndim == 1 and not meshes else None


def check_not_distributed(model: nn.Module, *, may_be_sharded: bool = False) -> None:
    """Raise a UsageError, saying in which order to do it, for a model that DDP or FSDP2 was put around already."""
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise UsageError(
            f"the model is inside {type(model).__name__} already: wrap the module inside, before: "
            "planner.auto_wrap(module, ...), then DistributedDataParallel(module)"
        )
    if is_sharded(model) and not may_be_sharded:
        raise UsageError(
            "the model's parameters are sharded already, and it is not planned without being wrapped: call "
            "planner.auto_wrap(model, budget=...), with runtime='regional' or none; or plan before fully_shard"
        )
