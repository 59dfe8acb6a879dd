"""Selective checkpointing: every block runs again but what a list of operators keeps.

Whatever of a block is not kept runs again at once, at the block's first need in the backward, not at its own.

Sources: ``create_selective_checkpoint_contexts`` in ``torch/utils/checkpoint.py`` of PyTorch 2.13, with the list
that its users give, products and attention; ``torchtitan/distributed/activation_checkpoint.py`` in
pytorch/torchtitan, whose policy keeps attention and of the products of linear layers every second one only.
"""

from __future__ import annotations

from planner.ir.graph import Operation
from planner.ir.schedule import Schedule
from planner.strategies._operators import is_fused_attention, is_linear, is_product_or_attention
from planner.strategies._step import Strategy, StrategyStep


def _torchtitan(step: StrategyStep, _: int) -> Schedule:
    """Count the products anew in each block: the first is kept, the second is not, and so on."""
    operations = step.graph.operations
    kept: set[str] = set()
    for block in step.blocks:
        linear = [operations[index] for index in block if is_linear(operations[index])]
        kept.update(operation.key for operation in linear[::2])

    def saved(operation: Operation) -> bool:
        return operation.key in kept or is_fused_attention(operation)

    return step.checkpointed(step.blocks, saved=saved)


STRATEGIES = (
    Strategy(
        name="selective",
        summary="torch's selective checkpointing of every block: products and attention are kept",
        schedule=lambda step, _: step.checkpointed(step.blocks, saved=is_product_or_attention),
    ),
    Strategy(
        name="torchtitan-selective",
        summary="torchtitan's: attention and every second product of a block are kept",
        schedule=_torchtitan,
    ),
)
