"""What ``torch.utils.checkpoint`` is used for: whole blocks run again.

Without reentrant autograd (``use_reentrant=False``, as PyTorch advises) a region runs again at the first need
of anything in it, up to the last thing that is needed.

``save_on_cpu`` sends whatever autograd saves to the host, of any size, and fetches it where the backward reads it, on
the stream that computes: copies are waited for. What several operations save is copied for each of them there, once
here. Around a checkpoint (``offload_wrapper``) it sends what the checkpoint saves, its inputs.

Sources: ``torch/utils/checkpoint.py`` of PyTorch 2.13 (``checkpoint``, ``checkpoint_sequential``);
``save_on_cpu`` in ``torch/autograd/graph.py`` and ``offload_wrapper`` in
``torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py`` of the same;
``gradient_checkpointing_enable(every_n_layers=N)`` of huggingface/transformers (pull request 48200);
Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, for segments of about the square root.
"""

from __future__ import annotations

import math
from itertools import chain

from planner.ir.schedule import Schedule
from planner.strategies._offloads import inputs_offloaded, offloaded
from planner.strategies._step import Strategy, StrategyStep


def _sequential(step: StrategyStep, number: int) -> Schedule:
    """Leave the last segment, which takes what does not divide, as it is."""
    size = len(step.blocks) // number
    if not size:
        raise step.cannot(f"has {len(step.blocks)} blocks, and not {number} to make as many segments of")
    return step.checkpointed(in_groups(step.blocks[: size * (number - 1)], size))


def _save_on_cpu(step: StrategyStep, _: int) -> Schedule:
    return offloaded(step, Schedule.keep_all(step.graph), filter(step.is_saved_freely, range(len(step.graph.values))))


def in_groups(blocks: tuple[tuple[int, ...], ...], size: int) -> list[tuple[int, ...]]:
    """Put so many blocks at a time together; the last group may be smaller.

    >>> in_groups(((0, 1), (2,), (3, 4)), 2)
    [(0, 1, 2), (3, 4)]
    """
    return [tuple(chain.from_iterable(blocks[first : first + size])) for first in range(0, len(blocks), size)]


def square_root(blocks: int) -> int:
    """Return the whole number nearest to the square root, at least 2."""
    return max(2, round(math.sqrt(blocks)))


STRATEGIES = (
    Strategy(
        name="pytorch-checkpoint",
        summary="torch.utils.checkpoint around every block",
        schedule=lambda step, _: step.checkpointed(step.blocks),
    ),
    Strategy(
        name="every",
        summary="torch.utils.checkpoint around every N-th block, from the first on",
        schedule=lambda step, number: step.checkpointed(step.blocks[::number]),
        number=lambda blocks: 2,
    ),
    Strategy(
        name="chunked",
        summary="every N-th boundary between blocks is kept, the N blocks between run again together",
        schedule=lambda step, number: step.checkpointed(in_groups(step.blocks, number)),
        number=square_root,
    ),
    Strategy(
        name="checkpoint-sequential",
        summary="torch.utils.checkpoint.checkpoint_sequential: N segments, of which the last is left as it is",
        schedule=_sequential,
        number=square_root,
    ),
    Strategy(
        name="save-on-cpu",
        summary="torch.autograd.graph.save_on_cpu around the forward: all that is saved waits on the host",
        schedule=_save_on_cpu,
    ),
    Strategy(
        name="offloaded-checkpoint",
        summary="torch.utils.checkpoint around every block, whose inputs wait on the host (offload_wrapper)",
        schedule=lambda step, _: inputs_offloaded(step, step.regions(step.blocks)),
    ),
)
