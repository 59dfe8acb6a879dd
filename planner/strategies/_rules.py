"""Rules of strategies: from a step and a number to the schedule in which a system runs it."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

from planner.ir.checkpoints import Region, schedule_of
from planner.ir.cut_points import turning_point
from planner.ir.graph import Operation, Phase, operator_name
from planner.ir.problem import Problem
from planner.ir.schedule import Offload, Schedule, recompute_lazily
from planner.ir.simulator import simulate
from planner.solving.segmentations import segmentations
from planner.solving.transfer_windows import widened
from planner.strategies._step import StrategyStep

Blocks = Sequence[Sequence[int]]

Rule = Callable[[StrategyStep, int], Schedule]

_NORM_MODULE = re.compile(r"norm(_?\d+)?$|(^|_)ln(_?\w)?$", re.IGNORECASE)

_UNSLOTH_MOVES_ABOVE_BYTES = 2 * 2**20


def _all(blocks: Blocks, _: int) -> Blocks:
    return blocks


def checkpoint(
    choose: Callable[[Blocks, int], Blocks] = _all,
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
        raise step.cannot(f"has {len(step.blocks)} blocks, and not {number} to make as many segments of")
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


def core_attention(step: StrategyStep, _: int) -> Schedule:
    """Checkpoint the attention of each block."""
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


def _between_products(step: StrategyStep, softmax: int, block: Sequence[int]) -> set[int]:
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
    step: StrategyStep, start: int, block: Sequence[int], next_to: Callable[[int], list[int]]
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


def output_discarding(step: StrategyStep, _: int) -> Schedule:
    """Recompute outputs of layer norms and activation functions when they are needed."""
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


def _norms_and_activations(step: StrategyStep, block: Sequence[int]) -> list[int]:
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


def searched_count(step: StrategyStep, budget_bytes: int) -> int | None:
    """Return the number of blocks that halving comes to; None if it comes to none that keeps the device's budget.

    O(log(blocks) x runs).
    """
    counts = range(len(step.blocks) + 1)
    found = bisect_left(counts, True, key=lambda count: peak_bytes(step, count) <= budget_bytes)
    return found if found in counts else None


def peak_bytes(step: StrategyStep, count: int) -> int:
    """Return the peak on the device with so many blocks checkpointed."""
    schedule = step.checkpointed(step.blocks[:count], whole=True)
    return simulate(step.graph, step.costs, schedule).peak_bytes + step.graph.total_static_bytes


def within_share_of_peak(step: StrategyStep, percent: int) -> Schedule:
    """Checkpoint as many first blocks as a search by halves finds for a share of the peak."""
    count = searched_count(step, peak_bytes(step, 0) * percent // 100)
    if count is None:
        raise step.cannot(f"has no number of blocks to checkpoint that the search finds to keep {percent}% of the peak")
    return step.checkpointed(step.blocks[:count], whole=True)


def entering_blocks(step: StrategyStep) -> list[int]:
    """Return the values that each block is made again from, and no other block is."""
    return [*chain(*step.entering(step.regions(step.blocks)))]


def policy(saveable: Callable[[Operation], bool]) -> Callable[[StrategyStep, int], Schedule]:
    """Return the rule that keeps what some operations give, and recomputes the rest of the forward."""
    return lambda step, _: _keeping(step, outputs_of(step, saveable))


def outputs_of(step: StrategyStep, by: Callable[[Operation], bool]) -> set[int]:
    """Return the values that operations of a kind give."""
    return {value for operation in step.graph.operations if by(operation) for value in operation.outputs}


def _keeping(step: StrategyStep, kept: Collection[int]) -> Schedule:
    """Make again what the backward reads of all other values of the forward."""
    graph = step.graph
    turn = turning_point(graph)
    dropped = [
        value
        for operation in graph.operations[:turn]
        if operation.recomputable
        for value in operation.outputs
        if value not in kept
    ]
    return recompute_lazily(graph, {turn: dropped})


def policy_offloading(step: StrategyStep, values: Iterable[int]) -> Schedule:
    """Keep some values on the host, and recompute the rest of the forward."""
    moved = set(filter(step.is_saved_freely, values))
    return _hiding(step, offloaded(step, _keeping(step, moved), moved))


def offloaded(
    step: StrategyStep, schedule: Schedule, values: Iterable[int], returns: Mapping[int, int] | None = None
) -> Schedule:
    """Let values be away from their last use in the forward to their first in the backward.

    What nobody reads in the backward stays. ``returns`` holds earlier positions to return at. Raises UsageError if
    there is no host.
    """
    if step.host is None:
        raise step.cannot("has no host's memory to offload to: nothing is known of the device's link to it")
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
        schedule.order,
        tuple(Offload(value, last[value] + 1, (early.get(value, due[value]),)) for value in sorted(due)),
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


def _hiding(step: StrategyStep, schedule: Schedule) -> Schedule:
    """Let transfers take the time that they can have without another peak."""
    problem = Problem(graph=step.graph, costs=tuple(step.costs), budget_bytes=0, host=step.host)
    return widened(replace(problem, budget_bytes=problem.evaluate(schedule).peak_bytes), schedule)


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

is_softmax = _is_one_of("_softmax", "_safe_softmax", "softmax")
"""Whether it is a softmax, not its logarithm."""

is_activation = _is_one_of(
    "elu", "gelu", "hardswish", "hardtanh", "leaky_relu", "mish", "relu", "sigmoid", "silu", "softplus", "tanh"
)
"""Whether it is an activation function."""


def is_product(operation: Operation) -> bool:
    """Whether it is a matrix product or a convolution."""
    return is_linear(operation) or is_batched_product(operation) or "convolution" in operator(operation)


def is_fused_attention(operation: Operation) -> bool:
    """Whether it is an attention kernel that makes no matrix of scores."""
    return "scaled_dot_product" in operator(operation) or "flex_attention" in operation.target


def is_product_or_attention(operation: Operation) -> bool:
    """Whether it is what selective checkpointing usually keeps."""
    return is_product(operation) or is_fused_attention(operation)


def is_batch_norm(operation: Operation) -> bool:
    """Whether it is a batch norm."""
    return "batch_norm" in operator(operation)


def is_layer_norm(operation: Operation) -> bool:
    """Whether it is a layer norm or an RMS norm, or a part of one: then its module is called so."""
    name = operator(operation)
    if "layer_norm" in name or "rms_norm" in name:
        return True
    module = operation.module.rpartition(".")[2]
    return _NORM_MODULE.search(module) is not None and not is_product(operation) and not is_batch_norm(operation)
