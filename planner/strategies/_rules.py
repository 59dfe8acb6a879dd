"""Rules of strategies: from a step and a number to the schedule in which a system runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice

from planner.ir.checkpoints import Region, schedule_of
from planner.ir.graph import Operation, operator_name
from planner.ir.schedule import Offload, Schedule
from planner.solving.segmentations import segmentations, turning_point
from planner.strategies import StrategyStep

Blocks = Sequence[Sequence[int]]

Rule = Callable[[StrategyStep, int], Schedule]

_UNSLOTH_MOVES_ABOVE_BYTES = 2 * 2**20


def checkpoint(
    choose: Callable[[Blocks, int], Blocks] = lambda blocks, _: blocks,
    *,
    saved: Callable[[Operation], bool] | None = None,
    whole: bool = False,
) -> Rule:
    """Return the rule that checkpoints groups of blocks; see :meth:`StrategyStep.checkpointed`."""
    return lambda step, number: step.checkpointed(choose(step.blocks, number), saved=saved, whole=whole)


def in_groups(blocks: Blocks, size: int) -> list[tuple[int, ...]]:
    """Put so many blocks at a time together; the last group may be smaller.

    >>> in_groups(((0, 1), (2,), (3, 4)), 2)
    [(0, 1, 2), (3, 4)]
    """
    return [tuple(chain.from_iterable(blocks[first : first + size])) for first in range(0, len(blocks), size)]


def square_root(blocks: int) -> int:
    """Return the whole number nearest to the square root, at least 2."""
    return max(2, round(math.sqrt(blocks)))


def sequential(step: StrategyStep, number: int) -> Schedule:
    """Checkpoint segments but the last, which takes what does not divide and is left as it is."""
    size = len(step.blocks) // number
    if not size:
        raise step.cannot(f"has {len(step.blocks)} blocks, too few for {number} segments")
    return step.checkpointed(in_groups(step.blocks[: size * (number - 1)], size))


def square_root_segments(step: StrategyStep, _: int) -> Schedule:
    """Take about as many segments as the square root of the places to cut."""
    segmented = next(islice(segmentations(step.graph), 1, 2), None)
    if segmented is None:
        raise step.cannot("has a forward that cannot be cut into segments")
    return segmented


def every_second_product(step: StrategyStep, _: int) -> Schedule:
    """Count the products anew in each block: the first is kept, the second is not, and so on."""
    operations = step.graph.operations
    kept: set[str] = set()
    for block in step.blocks:
        linear = [operations[index] for index in block if is_linear(operations[index])]
        kept.update(operation.key for operation in linear[::2])

    def saved(operation: Operation) -> bool:
        return operation.key in kept or is_fused_attention(operation)

    return step.checkpointed(step.blocks, saved=saved)


def offloaded(
    step: StrategyStep, schedule: Schedule, values: Iterable[int], returns: Mapping[int, int] | None = None
) -> Schedule:
    """Let values be away from their last use in the forward to their first in the backward.

    What nobody reads in the backward stays. ``returns`` holds earlier positions to return at. Raises UsageError if
    there is no host.
    """
    if step.host is None:
        raise step.cannot("cannot offload: the device's link to the host's memory is unknown")
    turn = schedule.order.index(turning_point(step.graph))
    wanted = set(values)
    last: dict[int, int] = {}
    due: dict[int, int] = {}
    for position, index in enumerate(schedule.order):
        operation = step.graph.operations[index]
        if position < turn:
            last.update(dict.fromkeys(wanted.intersection((*operation.inputs, *operation.outputs)), position))
        else:
            for value in wanted.intersection(operation.inputs):
                due.setdefault(value, position)
            wanted.difference_update(operation.outputs)  # what is made again is not fetched
    early = returns or {}
    return Schedule(
        schedule.order, tuple(Offload(value, last[value] + 1, (early.get(value, due[value]),)) for value in sorted(due))
    )


def inputs_offloaded(
    step: StrategyStep,
    regions: Sequence[Region],
    *,
    at_least_bytes: int = 0,
    keeps_last: bool = False,
    ahead: bool = False,
) -> Schedule:
    """Run regions again from inputs that wait on the host: all, or those at least so large, but for the last region.

    With ``ahead`` the inputs of one region come back while the backward of the region after it runs.
    """
    schedule = schedule_of(step.graph, regions)
    entering = step.entering(regions)[: len(regions) - 1 if keeps_last else None]
    sizes = step.graph.values
    moved = [[value for value in values if sizes[value].size_bytes >= at_least_bytes] for values in entering]
    begins = [_begin(schedule, region) for region in regions]
    returns = {value: begins[place + 1] for place, values in enumerate(moved[: len(regions) - 1]) for value in values}
    return offloaded(step, schedule, chain.from_iterable(moved), returns if ahead else None)


def _begin(schedule: Schedule, region: Region) -> int:
    """Return the position at which a region begins to run again."""
    first_run = schedule.order.index(region.recompute_before)
    while schedule.order[first_run - 1] in region.recompute:
        first_run -= 1
    return first_run


def save_on_cpu(step: StrategyStep, _: int) -> Schedule:
    """Let all that the forward saves wait on the host."""
    return offloaded(step, Schedule.keep_all(step.graph), filter(step.is_saved_freely, range(len(step.graph.values))))


def unsloth(step: StrategyStep, _: int) -> Schedule:
    """Checkpoint every block, whose input waits on the host if it is large."""
    regions = step.regions(step.blocks, whole=True)
    return inputs_offloaded(step, regions, at_least_bytes=_UNSLOTH_MOVES_ABOVE_BYTES + 1, keeps_last=True, ahead=True)


# Kinds of operators that the rules of several systems speak of.


def operator(operation: Operation) -> str:
    """Return an operator's own name: ``mm`` of ``aten.mm.default``."""
    return operator_name(operation.target)


def _is_one_of(*names: str) -> Callable[[Operation], bool]:
    return lambda operation: operator(operation) in names


is_linear = _is_one_of("mm", "addmm", "_scaled_mm", "linear")
"""Whether it is a matrix product without batch dimensions, as of a linear layer."""

is_batched_product = _is_one_of("bmm", "baddbmm")
"""Whether it is a matrix product for each entry of a batch, as in attention that is not fused."""


def is_fused_attention(operation: Operation) -> bool:
    """Whether it is an attention kernel that makes no matrix of scores."""
    return "scaled_dot_product" in operator(operation) or "flex_attention" in operation.target


def is_product_or_attention(operation: Operation) -> bool:
    """Whether it is what selective checkpointing usually keeps."""
    is_product = is_linear(operation) or is_batched_product(operation) or "convolution" in operator(operation)
    return is_product or is_fused_attention(operation)
