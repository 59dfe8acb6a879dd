"""What torch.distributed has made of a model, and whether there is more than one process."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from planner.errors import UsageError


def has_several_ranks() -> bool:
    """Whether torch.distributed is initialised with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` has spread parameters of a model over ranks."""
    if not has_distributed_tensors(model):
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def has_distributed_tensors(model: nn.Module) -> bool:
    """Whether parameters of a model are spread over ranks, by ``fully_shard`` or by ``parallelize_module``."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor  # takes a while to import

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


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
