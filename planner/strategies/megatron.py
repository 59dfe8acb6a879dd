"""Megatron-Core's recomputation: whole layers, core attention, or the outputs of cheap operations.

``--recompute-granularity full`` with ``--recompute-method uniform`` runs groups of ``--recompute-num-layers``
layers again, with ``block`` the first so many of each pipeline stage, each by itself; here there is one stage.
``selective`` with ``core_attn`` (the default) runs from the product of queries and keys to that with the values
again. These enter autograd anew (``tensor_parallel.checkpoint``), so a region runs again to its end.

``layernorm`` and ``moe_act`` discard outputs instead (``CheckpointWithoutOutput``): what a layer norm or an
activation function makes is dropped once its reader has run, and made again when the gradient of that reader's
output is there; their inputs are kept. Megatron-Core does so with the activation functions of experts; here it is
done with those of every MLP, with the product by a gate.

``--distribute-saved-activations`` with ``full`` keeps of every layer's hidden states the part of this device, and
gathers them before the layer runs again; sequence parallelism, which divides them anyway, excludes it.

Sources: ``megatron/core/transformer/transformer_config.py`` (``recompute_modules``) and
``megatron/core/tensor_parallel/random.py`` in NVIDIA/Megatron-LM; Megatron Core's developer guide, 0.20.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.ir.cut_points import turning_point
from planner.ir.graph import Phase
from planner.ir.schedule import Schedule, recompute_lazily
from planner.strategies._divided import DEVICES, divided, every_block_gathered
from planner.strategies._operators import (
    is_activation,
    is_batched_product,
    is_fused_attention,
    is_layer_norm,
    is_product,
    is_product_or_attention,
    is_softmax,
)
from planner.strategies._step import Strategy, StrategyStep
from planner.strategies.pytorch import in_groups


def first_blocks(step: StrategyStep, count: int) -> Schedule:
    """Return the schedule in which each of the first so many blocks runs again."""
    return step.checkpointed(step.blocks[:count], whole=True)


def _core_attention(step: StrategyStep, _: int) -> Schedule:
    operations = step.graph.operations
    regions: list[set[int]] = []
    for block in step.blocks:
        inside = {index for index in block if is_fused_attention(operations[index])}
        for index in block:
            if is_softmax(operations[index]):
                inside |= _between_products(step, index, block)
        if inside:
            regions.append(inside)
    if not regions:
        raise step.cannot("has no attention in its blocks")
    return step.checkpointed(regions, whole=True)


def _between_products(step: StrategyStep, softmax: int, block: tuple[int, ...]) -> set[int]:
    """Return what runs from the batched product before a softmax to the one after it; nothing if there are no such."""
    graph = step.graph

    def before(index: int) -> list[int]:
        return [graph.producer[value] for value in graph.operations[index].inputs]

    def after(index: int) -> list[int]:
        return [reader for value in graph.operations[index].outputs for reader in graph.readers[value]]

    up, down = _up_to_products(step, softmax, block, before), _up_to_products(step, softmax, block, after)
    ends = (any(is_batched_product(graph.operations[index]) for index in found) for found in (up, down))
    return up | down if all(ends) else set()


def _up_to_products(
    step: StrategyStep, start: int, block: tuple[int, ...], next_to: Callable[[int], list[int]]
) -> set[int]:
    """Go from an operation to its neighbours on one side as far as the first products, which are taken too."""
    operations = step.graph.operations
    inside, found, pending = set(block), {start}, [start]
    while pending:
        for index in next_to(pending.pop()):
            if index in inside and index not in found and operations[index].phase is Phase.FORWARD:
                if is_product(operations[index]) and not is_batched_product(operations[index]):
                    continue
                found.add(index)
                if not is_product(operations[index]):
                    pending.append(index)
    return found


def _output_discarding(step: StrategyStep, _: int) -> Schedule:
    graph = step.graph
    discarded = [
        value
        for block in step.blocks
        for index in _norms_and_activations(step, block)
        if graph.operations[index].recomputable
        for value in graph.operations[index].outputs
    ]
    if not discarded:
        raise step.cannot("has neither layer norms nor activation functions in its blocks")
    return recompute_lazily(graph, {turning_point(graph): discarded})


def _norms_and_activations(step: StrategyStep, block: tuple[int, ...]) -> list[int]:
    """Return both, an activation with the rest of its module if that does little else: a gate, its parts."""
    operations = [step.graph.operations[index] for index in block]
    modules = {operation.module for operation in operations if is_activation(operation)}
    modules -= {
        operation.module for operation in operations if is_product_or_attention(operation) or is_softmax(operation)
    }
    modules.discard(step.layers.of[block[0]])
    return [
        index
        for index, operation in zip(block, operations, strict=True)
        if is_layer_norm(operation) or is_activation(operation) or operation.module in modules
    ]


def _distributed(step: StrategyStep, number: int) -> StrategyStep:
    """Divide of what enters each block the largest: the hidden states."""
    entering = step.entering(step.regions(step.blocks, whole=True))
    sizes = step.graph.values
    largest = [max(values, key=lambda u: (sizes[u].size_bytes, -u)) for values in entering if values]
    return divided(step, largest, number)


STRATEGIES = (
    Strategy(
        name="megatron-uniform",
        summary="Megatron-Core, full and uniform: all blocks, N at a time",
        schedule=lambda step, number: step.checkpointed(in_groups(step.blocks, number), whole=True),
        number=lambda blocks: 2,
    ),
    Strategy(
        name="megatron-block",
        summary="Megatron-Core, full and block: each of the first N blocks",
        schedule=first_blocks,
        number=lambda blocks: max(1, blocks // 2),
    ),
    Strategy(
        name="megatron-selective",
        summary="Megatron-Core, selective: core attention",
        schedule=_core_attention,
    ),
    Strategy(
        name="megatron-output-discarding",
        summary="Megatron-Core, selective: outputs of layer norms and activation functions",
        schedule=_output_discarding,
    ),
    Strategy(
        name="megatron-distributed",
        summary="Megatron-Core, full, hidden states divided over N devices (--distribute-saved-activations)",
        schedule=every_block_gathered,
        number=lambda blocks: DEVICES,
        step=_distributed,
        note="gathering what N devices share takes time, which is not counted",
    ),
)
