"""What a model is, read off its module tree: its device, how it is spread over ranks, which parts are compiled."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from inspect import getattr_static
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils import _pytree as pytree

from planner.capture.fake_internals import is_without_data
from planner.capture.module_internals import ddp_around, has_full_backward_hooks
from planner.capture.sharding import SHARES, WHOLE, Unit
from planner.capture.torch_internals import NormWithStatistics, installed_call
from planner.errors import UsageError
from planner.findings.rules import ModuleFacts
from planner.ir.graph import TrainingGraph
from planner.ir.layers import find_blocks, is_within

_FSDP = "torch.distributed.fsdp"
"""Slow to import: a model is sharded only where somebody has imported it."""


def of_model(model: nn.Module, *arguments: Any) -> torch.device:
    """Return the device of a model's first parameter or buffer, else of a tensor among the arguments; else the CPU."""
    tensor = next(chain(model.parameters(), model.buffers()), None)
    if tensor is None:
        tensor = next((leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)), None)
    return torch.device("cpu") if tensor is None else tensor.device


def compiled_parts(model: nn.Module) -> list[str]:
    """Return the names of a model's parts that their own ``compile()`` compiled."""
    calls = ((name, installed_call(part)) for name, part in model.named_modules() if part is not model)
    return [name for name, call in calls if call is not None and not hasattr(call, "call")]


def has_several_ranks() -> bool:
    """Whether torch.distributed is initialised with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` has spread parameters of a model over ranks, and they are spread now."""
    return has_distributed_tensors(model) and has_units(model)


def has_units(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a model or its parts, whatever its parameters are now."""
    fsdp = _fsdp()
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def _fsdp() -> Any:
    """Return :mod:`planner.capture.fsdp_internals`, if anything can be sharded."""
    if _FSDP not in sys.modules:
        return None
    from planner.capture import fsdp_internals

    return fsdp_internals


def units_of(model: nn.Module) -> list[Unit]:
    """Return what ``fully_shard`` gathers together of a model, whatever its parameters are now; none if it does not."""
    fsdp = _fsdp()
    return [] if fsdp is None else list(fsdp.sharded_units(model))


def shards_of(model: nn.Module) -> int:
    """Return over how many ranks a model is sharded; 1 if it is not."""
    return int(_fsdp().shards_of(model)) if has_units(model) else 1


def gradient_state(model: nn.Module) -> Hashable:
    """Return how the call of a model that begins treats gradients, and what it finds of earlier ones.

    Of a model that is neither sharded nor inside DDP there is nothing to say.
    """
    fsdp = _fsdp()
    return (() if fsdp is None else fsdp.gradient_state(model)) or ddp_around(model)


def finds_gradients(model: nn.Module) -> bool:
    """Whether gradients of earlier backwards are there as the call of a model begins that several ranks train."""
    if units := units_of(model):
        return any(not unit.finds.isdisjoint((WHOLE, SHARES)) for unit in units)
    ddp = ddp_around(model)
    return ddp is not None and ddp.finds_gradients


def unplanned_sharding(model: nn.Module, blocks: Iterable[str], ranks: int | None) -> str | None:
    """Say how a sharded model is, if that is otherwise than a plan counts on."""
    return _fsdp().unplanned_sharding(model, blocks, ranks) if has_units(model) else None


def whole(model: nn.Module) -> AbstractContextManager[None]:
    """Let a sharded model be as its own code sees it: see :func:`planner.capture.fsdp_internals.unsharded`."""
    return _fsdp().unsharded(model) if has_units(model) else nullcontext()


def sharded_inside(model: nn.Module) -> str:
    """Name a part of a block that ``fully_shard`` spreads by itself, whose hooks run inside the block; ``""`` if none.

    >>> sharded_inside(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    ''
    """
    units, kinds = [unit.path for unit in units_of(model)], kinds_of(model)
    blocks = find_blocks(dict.fromkeys(kinds, 1), kinds) if units else ()
    return next((unit for unit in units for block in blocks if unit != block and is_within(unit, block)), "")


def shares_layers(model: nn.Module) -> bool:
    """Whether ranks share layers of a model (``parallelize_module``), which may be sharded as well."""
    return _fsdp().shares_layers(model) if is_sharded(model) else has_distributed_tensors(model)


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
            "the model's parameters are sharded already, and only auto_wrap plans such a model: call "
            "planner.auto_wrap(model, budget=...), with runtime='regional' or none; or plan before fully_shard"
        )


# Classes are known by their names, so that nothing of torch.distributed is imported to ask.
_CHECKPOINTING = {"CheckpointWrapper"}
_SHARDING = {"FSDPModule", "FullyShardedDataParallel"}


def module_facts(model: nn.Module) -> tuple[ModuleFacts, ...]:
    """Describe every module of a model."""
    configured: set[int] = set()
    return tuple(_facts(path, module, configured) for path, module in model.named_modules())


def _facts(path: str, module: nn.Module, configured: set[int]) -> ModuleFacts:
    classes = {cls.__name__ for cls in type(module).__mro__}
    config = getattr(module, "config", None)
    # Parts of a model often share its configuration: the outermost one answers for it.
    fills_cache = module.training and id(config) not in configured and getattr(config, "use_cache", False) is True
    configured.add(id(config))
    return ModuleFacts(
        path=path,
        kind=type(module).__name__,
        updates_statistics=updates_statistics(module),
        full_backward_hooks=has_full_backward_hooks(module),
        checkpointing_on=bool(classes & _CHECKPOINTING)
        or (module.training and getattr(module, "gradient_checkpointing", False) is True),
        fills_cache=fills_cache,
        sharded=bool(classes & _SHARDING),
    )


def updates_statistics(module: nn.Module) -> bool:
    """Whether each call of a module changes its running statistics."""
    return isinstance(module, NormWithStatistics) and module.training and module.running_mean is not None


def outside_bytes(graph: TrainingGraph) -> int:
    """Count what a model gives to a loss outside the captured step: nothing where it returns its loss, a scalar."""
    if graph.loss_index == len(graph.operations):
        return 0
    received = (graph.values[value] for value in graph.operations[graph.loss_index].outputs)
    sizes = [value.size_bytes for value in received if value.kind == "tangent"]
    return sum(size_bytes for size_bytes in sizes if size_bytes > graph.alignment_bytes)


def is_fake(model: nn.Module) -> bool:
    """Whether a model was built under a fake mode."""
    return any(map(is_without_data, chain(model.parameters(), model.buffers())))


def kinds_of(model: nn.Module) -> dict[str, str]:
    """Give the class of each module that can be called, by its path: a ``ModuleList`` cannot."""
    return {
        path: type(module).__name__
        for path, module in model.named_modules(remove_duplicate=False)
        if getattr_static(type(module), "forward") is not nn.Module.forward  # what is scripted has it on objects alone
    }
