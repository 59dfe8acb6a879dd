"""Memory resident during a training step: parameters, gradients, optimizer state, communication buffers, a reserve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from cost_models.devices import DeviceSpec
from planner.capture.inputs import static_bytes
from planner.capture.torch_internals import in_memory
from planner.common.options import Training
from planner.common.units import parse_size, round_up
from planner.ir.layers import layer_among
from planner.ir.static_memory import StaticMemory
from planner.measure import devices
from planner.measure.optimizers import OptimizerMemory, optimizer_memory

Blocks = Callable[[], Collection[str]]
"""Gives the paths of a model's blocks, each of which FSDP2 shards by itself; not everybody needs to know them."""


def static_memory(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    spec: DeviceSpec,
    training: Training,
    blocks: Blocks = tuple,
    optimizer: OptimizerMemory | None = None,
) -> StaticMemory:
    """Count everything that is resident while a whole model trains, and the optimizer's temporaries.

    Of an ``optimizer`` that exists it is known what it needs here; else ``training`` names one.

    DDP holds a copy of every gradient in its buckets (unless ``gradient_as_bucket_view=True``).
    Under FSDP2 every tensor is split along its first dimension; what belongs to no block is gathered
    for the whole step, and of the blocks two at a time (the one at work and the next), each with
    what its gradients need before they are spread: an upper bound on what ``fully_shard`` holds with
    its default prefetching (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
    """
    alignment_bytes = spec.alignment_bytes
    resident = static_bytes(model, inputs, alignment_bytes=alignment_bytes)
    memory = optimizer or optimizer_memory(
        model.parameters(),
        training.optimizer,
        alignment_bytes=alignment_bytes,
        device_kind=spec.kind,
        master_weights=training.master_weights,
    )
    trainable_bytes = sum(_bytes(p, alignment_bytes) for p in model.parameters() if p.requires_grad)
    shards = training.ranks if training.data_parallel == "fsdp2" else 1
    shards_of_state = 1 if optimizer else shards
    whole_bytes = resident["parameters"]
    resident["parameters"] = _share(whole_bytes, shards)
    beside = {
        "gradients": _share(trainable_bytes, shards) * training.gradient_accumulation,
        "optimizer": _share(memory.state_bytes, shards_of_state),
        "master weights": _share(memory.master_bytes, shards),
        "communication buffers": _communication_bytes(model, training, trainable_bytes, alignment_bytes, blocks),
        "library workspace": spec.library_bytes,
        "reserve": parse_size(training.reserve, whole_bytes=spec.memory_bytes) if training.reserve else 0,
    }
    resident |= {kind: size_bytes for kind, size_bytes in beside.items() if size_bytes}
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers(), *inputs)}.values()
    of_libraries = devices.pieces(spec) if shards == 1 else ()
    others = sum(size_bytes for kind, size_bytes in beside.items() if kind != "reserve") - sum(of_libraries)
    return StaticMemory(
        static_bytes=resident,
        optimizer_step_bytes=_share(memory.step_bytes, shards_of_state),
        gradient_shards=shards,
        tensor_bytes=(*(_bytes(tensor, alignment_bytes) for tensor in tensors), others)
        if shards == 1
        else (sum(resident.values()),),
        library_bytes=of_libraries,
        has_caching_allocator=spec.kind == "cuda",
        has_expandable_segments=spec.kind == "cuda" and devices.expandable_segments(),
        allocator_settings=devices.not_simulated() if spec.kind == "cuda" else "",
    )


def _communication_bytes(
    model: nn.Module, training: Training, trainable_bytes: int, alignment_bytes: int, blocks: Blocks
) -> int:
    if training.data_parallel == "ddp":
        return trainable_bytes
    if training.data_parallel != "fsdp2":
        return 0
    paths, of_blocks = blocks(), Counter[str]()
    for name, parameter in model.named_parameters():
        of_blocks[layer_among(name, paths)] += _bytes(parameter, alignment_bytes)
    root_bytes = of_blocks.pop("", 0)
    largest_bytes = max(of_blocks.values(), default=0)
    # Gathered: the root and two blocks. Gradients before they are spread: of the unit at work, and what is sent.
    return root_bytes + 2 * largest_bytes + 2 * max(root_bytes, largest_bytes)


def _bytes(tensor: torch.Tensor, alignment_bytes: int) -> int:
    return round_up(in_memory(tensor).nbytes, alignment_bytes)


def _share(size_bytes: int, shards: int) -> int:
    return -(-size_bytes // shards)
