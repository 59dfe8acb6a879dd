"""DeepSpeed's checkpoints of every block: their inputs wait on the host, or are divided over a model-parallel group.

Autograd is entered anew for each block, so all of a block runs again. ``cpu_checkpointing`` copies the block's inputs
to the host before the block runs, and back before it runs again, on the stream that computes: the copies out hold
computing up, which is not counted here as far as they would hide behind the block; those back are waited for.
``partition_activations`` keeps of every input the part of this device, cloned before the block runs, and gathers it
before the block runs again. ``contiguous_memory_optimization`` puts these parts into one buffer made at the begin:
the same bytes, and less fragmentation, so it has no row of its own.

Sources: ``deepspeed/runtime/activation_checkpointing/checkpointing.py`` (``CheckpointFunction``,
``partition_activations``, ``gather_partitioned_activations``) in deepspeedai/DeepSpeed; the section on activation
checkpointing of DeepSpeed's configuration.
"""

from __future__ import annotations

from planner.ir.schedule import Schedule
from planner.strategies._divided import check_divides, divided, gathered
from planner.strategies._offloads import inputs_offloaded
from planner.strategies._step import Strategy, StrategyStep

DEVICES = 8
"""Size of the group that values are divided over, where none is named: that of one server."""


def _cpu_checkpointing(step: StrategyStep, number: int) -> Schedule:
    return inputs_offloaded(step, step.regions(step.blocks, whole=True))


def _partitioned(step: StrategyStep, number: int) -> StrategyStep:
    check_divides(number)
    entering = step.entering(step.regions(step.blocks, whole=True))
    return divided(step, [value for values in entering for value in values], number)


def every_block_gathered(step: StrategyStep, number: int) -> Schedule:
    """Run every block again, after its inputs have been gathered."""
    return gathered(step, step.regions(step.blocks, whole=True))


STRATEGIES = (
    Strategy(
        name="deepspeed-cpu-checkpointing",
        summary="DeepSpeed: every block runs again, its inputs wait on the host (cpu_checkpointing)",
        schedule=_cpu_checkpointing,
    ),
    Strategy(
        name="deepspeed-partition-activations",
        summary="DeepSpeed: every block runs again, its inputs divided over N devices (partition_activations)",
        schedule=every_block_gathered,
        number=lambda blocks: DEVICES,
        step=_partitioned,
        note="gathering what N devices share takes time, which is not counted",
    ),
)
