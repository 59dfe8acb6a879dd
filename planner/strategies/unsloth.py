"""Unsloth's checkpoints: every layer runs again, and its input waits on the host.

Inputs of up to 2 MiB (in 16 bits) stay, and so does that of the last layer, which is needed again at once. The copy
out runs beside the layer, on a stream of its own; the layer ends when it does. The copy back goes to one of two
buffers in turn, so it runs while the backward of the layer after it does. Those two buffers stay allocated through
the forward too; here they are there while something is in them.

Source: ``UnslothCheckpointFunction`` in ``unsloth_zoo/gradient_checkpointing.py`` of unslothai/unsloth-zoo (0373fcc).
"""

from __future__ import annotations

from planner.ir.schedule import Schedule
from planner.strategies._offloads import inputs_offloaded
from planner.strategies._step import Strategy, StrategyStep

_MORE_THAN_BYTES = 2 * 2**20


def _smart(step: StrategyStep, _: int) -> Schedule:
    regions = step.regions(step.blocks, whole=True)
    return inputs_offloaded(step, regions, at_least_bytes=_MORE_THAN_BYTES + 1, keeps_last=True, ahead=True)


STRATEGIES = (
    Strategy(
        name="unsloth",
        summary="Unsloth: every layer runs again, its input waits on the host if it is large; the last one's stays",
        schedule=_smart,
    ),
)
