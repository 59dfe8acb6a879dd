"""The search by halves for the number of blocks to checkpoint that keeps a budget, the first ones first.

What scripts around ``--recompute-num-layers`` do: try half the layers, then half of what is left. It takes for
granted that one block more never needs more memory. It may: when the last block runs again, the gradients of what
comes after it are already there, which they were not when it first ran. The search then passes over a number
that would have done, and finds a larger one, or none.
"""

from __future__ import annotations

from bisect import bisect_left

from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.strategies._step import Strategy, StrategyStep
from planner.strategies.megatron import first_blocks


def search(step: StrategyStep, budget_bytes: int) -> int | None:
    """Return the number of blocks that halving comes to; None if it comes to none that keeps the device's budget.

    O(log(blocks) x runs).
    """
    counts = range(len(step.blocks) + 1)
    found = bisect_left(counts, True, key=lambda count: peak_bytes(step, count) <= budget_bytes)
    return found if found in counts else None


def peak_bytes(step: StrategyStep, count: int) -> int:
    """Return the peak on the device with so many blocks checkpointed."""
    schedule = first_blocks(step, count)
    return simulate(step.graph, step.costs, schedule).peak_bytes + step.graph.total_static_bytes


def _of_the_peak(step: StrategyStep, percent: int) -> Schedule:
    count = search(step, peak_bytes(step, 0) * percent // 100)
    if count is None:
        raise step.cannot(f"has no number of blocks to checkpoint that the search finds to keep {percent}% of the peak")
    return first_blocks(step, count)


STRATEGIES = (
    Strategy(
        name="binary-search",
        summary="the number of blocks to checkpoint, searched by halves to keep N% of the peak without recompute",
        schedule=_of_the_peak,
        number=lambda blocks: 75,
    ),
)
