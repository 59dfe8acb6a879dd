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

from itertools import chain

from planner.strategies._divided import DEVICES, divided, every_block_gathered
from planner.strategies._offloads import inputs_offloaded
from planner.strategies._step import Strategy

STRATEGIES = (
    Strategy(
        name="deepspeed-cpu-checkpointing",
        summary="DeepSpeed: every block runs again, its inputs wait on the host (cpu_checkpointing)",
        schedule=lambda step, _: inputs_offloaded(step, step.regions(step.blocks, whole=True)),
    ),
    Strategy(
        name="deepspeed-partition-activations",
        summary="DeepSpeed: every block runs again, its inputs divided over N devices (partition_activations)",
        schedule=every_block_gathered,
        number=lambda blocks: DEVICES,
        step=lambda step, number: divided(
            step, [*chain(*step.entering(step.regions(step.blocks, whole=True)))], number
        ),
        note="gathering what N devices share takes time, which is not counted",
    ),
)
