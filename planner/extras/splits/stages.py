"""The devices of a pipeline under a split: which layers each has, what is resident there, and what it can keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from planner.extras.splits.table import FULL, KEEP, Choice, Layer, ModelTable
from planner.extras.splits.types import FSDP2, FSDP2_KEPT, OPTIMIZER, REPLICATED, Mixed, Split

FIRST, LAST, ROW = 0, 1, 2
"""What stands before the row of layers, what stands after it, and the first kind of the row: numbers of layers."""

Stage = tuple[int, ...]
"""A device of a pipeline: the numbers of its layers, those of the row first."""


class Share(NamedTuple):
    """What a device has of a layer: samples, and over how many devices its weights are shared."""

    micro_batch: int
    tensor: int

    def held(self, size_bytes: int) -> int:
        """Return what a device holds of so many bytes of a sample: devices that share layers divide its tokens too."""
        return -(-size_bytes * self.micro_batch // self.tensor)


def has_short_ends(layers: int, groups: int) -> bool:
    """Whether the first group and the last have one layer less than the others, for what stands beside the row."""
    return layers % groups != 0 and groups > 2


def can_cut(layers: int, groups: int) -> bool:
    """Whether a row can be cut so that engines can be told: in equal groups, or with one layer less at both ends.

    >>> can_cut(32, 4), can_cut(126, 8), can_cut(32, 5)
    (True, True, False)
    """
    return groups <= layers and (layers + 2 * has_short_ends(layers, groups)) % groups == 0


def cut_row(layers: int, pipeline: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each device, in groups that are as equal as :func:`can_cut` says.

    >>> cut_row(6, 4, 1), cut_row(4, 2, 2)
    (((0,), (1, 2), (3, 4), (5,)), ((0, 2), (1, 3)))
    """
    groups = pipeline * chunks
    less = has_short_ends(layers, groups)
    each, over = divmod(layers + 2 * less, groups)
    # What engines cannot be told, and still may be estimated: inner groups have what is left over.
    sizes = [each + (0 < index <= over) - (less and index in (0, groups - 1)) for index in range(groups)]
    rows = [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return tuple(tuple(layer for row in rows[device::pipeline] for layer in row) for device in range(pipeline))


def stages_of(table: ModelTable, pipeline: int, chunks: int) -> tuple[Stage, ...]:
    """Cut a model into the stages of a pipeline."""
    stages = [[ROW + table.row[layer] for layer in row] for row in cut_row(len(table.row), pipeline, chunks)]
    stages[0].append(FIRST)
    stages[-1].append(LAST)
    return tuple(map(tuple, stages))


def in_flight(split: Split, stage: int, micro_batches: int) -> float:
    """Return how many micro-batches a stage holds at most, the one at work included.

    Of an interleaved pipeline they are passes through one chunk, as shares of the device's layers. A stage begins with
    that many forwards less one: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", 2021, section 2.2; for interleaved ones Megatron-LM's code.
    """
    stages_after, chunks = split.pipeline - stage - 1, split.chunks
    warm_up = stages_after if chunks == 1 else 2 * stages_after + (chunks - 1) * split.pipeline
    return min(warm_up + 1, micro_batches * chunks) / chunks


class Weights(NamedTuple):
    """Bytes of a stage's parameters, gradients and optimizer state on one device: whole, and what one shard has."""

    whole: tuple[int, ...]
    sharded: tuple[int, ...]
    largest_layer: int
    """Parameters of one layer of the row."""
    ends: int
    """Parameters of what is there beside the row."""


def weights_of(table: ModelTable, layers: Sequence[Layer], stage: Stage, tensor: int, shards: int) -> Weights:
    """Count the weights of a stage, shared by the devices of a layer."""
    times = dict[int, float](Counter(stage))
    if FIRST in times and LAST in times:  # what both ends hold is there once
        times[LAST] -= table.tied_bytes / max(table.last.parameter_bytes, 1)
    whole, largest, ends = np.zeros(3), 0.0, 0.0
    for number, count in times.items():
        layer = layers[number]
        bytes_of = np.array([layer.parameter_bytes, layer.gradient_bytes, layer.optimizer_bytes]) / tensor
        whole += count * bytes_of
        parameter_bytes = float(bytes_of[0])
        if number >= ROW:
            largest = max(largest, parameter_bytes)
        else:
            ends += count * parameter_bytes
    return Weights(tuple(map(ceil, whole)), tuple(map(ceil, whole / shards)), ceil(largest), ceil(ends))


def resident(weights: Weights, split: Split, micro_batches: int) -> dict[str, int]:
    """Return what is resident on a device of a stage, by kind.

    Gradients of a pipeline are whole until its last micro-batch, so that they are reduced once. FSDP2 gathers what is
    in no layer, and two layers at a time, and has what their gradients need before they are spread; DDP has a copy of
    all gradients in its buckets.
    """
    parameters, gradients, optimizer = weights.whole
    communication = 0
    if split.data > 1 and split.sharding in (FSDP2, FSDP2_KEPT):
        unit = max(weights.ends, weights.largest_layer)
        gathered = parameters if split.sharding == FSDP2_KEPT else weights.ends + 2 * weights.largest_layer
        communication = gathered + 2 * unit
        whole_gradients = gradients
        parameters, gradients, optimizer = weights.sharded
        if accumulates(split, micro_batches):
            gradients = whole_gradients
    elif split.data > 1 and split.sharding == OPTIMIZER:
        optimizer = weights.sharded[2]
    elif split.data > 1 and split.sharding == REPLICATED and split.engine == "torchtitan":
        communication = gradients
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "communication": communication}


def accumulates(split: Split, micro_batches: int) -> bool:
    """Whether gradients are whole until the last micro-batch."""
    return split.pipeline > 1 and micro_batches > 1


class Kept(NamedTuple):
    """What a stage keeps, what that takes, and what it runs again."""

    mixed: Mixed
    held_bytes: int
    """Beside what is resident, with all that is in flight."""
    working_bytes: int
    """Of that, what is there for the micro-batch at work alone."""
    seconds: float
    """Run again for a micro-batch."""
    summed_bytes: int
    """Of one sample, summed again."""


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Ways:
    """All that a stage can keep of a micro-batch, from what runs least again to what runs most.

    Its first layers keep by one choice, the others by another: a column of ``mixes`` says which, and how many are the
    first.
    """

    names: Sequence[str]
    layers: int
    mixes: Array
    saved_bytes: Array
    working_bytes: Array
    seconds: Array
    summed_bytes: Array
    saved_once_bytes: int
    """What the last layer saves: of one micro-batch alone, whose backward comes at once."""
    is_simple: Array
    """Whether layers run again as a whole, or not at all: more than that Megatron cannot be told."""

    def best(self, room_bytes: int, flying: float, engine: str) -> Kept:
        """Return what fits and runs least again, with so many micro-batches in flight; else what takes fewest bytes."""
        held_bytes = np.ceil(self.saved_bytes * flying) + (self.saved_once_bytes + self.working_bytes)
        if engine == "megatron":
            held_bytes[~self.is_simple] = np.inf
        fitting = held_bytes <= room_bytes
        at = int(fitting.argmax())
        if not fitting[at]:
            at = int(held_bytes.argmin())
        first, others, count = self.mixes[:, at].tolist()
        return Kept(
            Mixed(layers=self.layers, first=self.names[first], others=self.names[others], count=count),
            int(held_bytes[at]),
            int(self.working_bytes[at]),
            float(self.seconds[at]),
            int(self.summed_bytes[at]),
        )


def ways_of(stage: Stage, layers: Sequence[Layer], reruns: Sequence[Sequence[float]], share: Share) -> Ways:
    """Return what a stage can keep under a share; ``reruns`` are seconds of each choice, by the number of a layer."""
    names = [choice.name for choice in layers[ROW].choices]
    row = [number for number in stage if number >= ROW]
    ends = {number: layers[number].choices[0] for number in stage if number < ROW}

    def working_bytes(number: int, choice: Choice) -> int:
        boundary_bytes, gathered_bytes = layers[number].boundary_bytes, 0
        if share.tensor > 1:  # what is summed and scattered along the sequence is there whole for a moment
            gathered_bytes = boundary_bytes * share.micro_batch - share.held(boundary_bytes)
        return share.held(choice.working_bytes) + gathered_bytes

    # For each kind of layer and each choice: bytes saved, seconds again, bytes summed again, bytes at work.
    figures = {
        number: [
            (share.held(choice.saved_bytes), seconds, choice.summed_bytes, working_bytes(number, choice))
            for choice, seconds in zip(layers[number].choices, reruns[number], strict=True)
        ]
        for number in set(row)
    }
    sums = np.zeros((len(row) + 1, len(names), 4))
    np.cumsum(np.array([figures[number] for number in row]), axis=0, out=sums[1:])
    first, others, count = mixes = _mixes(len(row), len(names))
    saved, seconds, summed, _ = (sums[count, first] + sums[-1, others] - sums[count, others]).T
    most = np.max(list(figures.values()), axis=0)[:, 3]
    at_ends = max((working_bytes(number, choice) for number, choice in ends.items()), default=0)
    at_work = np.maximum(np.where(count > 0, most[first], 0), np.where(count < len(row), most[others], 0))
    at_work = np.maximum(at_work, at_ends)
    once_bytes = {number: share.held(choice.saved_bytes) for number, choice in ends.items()}
    saved += once_bytes.get(FIRST, 0)
    order = np.lexsort((saved + at_work, seconds))
    is_whole = np.array([name in (KEEP, FULL) for name in names])
    return Ways(
        names=names,
        layers=len(row),
        mixes=mixes[:, order],
        saved_bytes=saved[order],
        working_bytes=at_work[order],
        seconds=seconds[order],
        summed_bytes=summed[order],
        saved_once_bytes=once_bytes.get(LAST, 0),
        is_simple=(is_whole[first] & is_whole[others])[order],
    )


@cache
def _mixes(layers: int, choices: int) -> Array:
    """Return which choices a row can mix, each first one with one that keeps more, and how many layers are the first.

    >>> _mixes(2, 2).T.tolist()
    [[0, 0, 0], [1, 0, 1], [1, 0, 2]]
    """
    found = [(0, 0, 0)]
    for first in range(choices):
        for others in range(first):
            found += [(first, others, count) for count in range(1, layers + (others == 0))]
    return np.array(found).T
