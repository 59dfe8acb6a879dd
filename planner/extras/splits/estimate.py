"""How long a step takes under a split, and what each device holds.

What is assumed, beside the roofline's efficiencies:

- Devices that share layers share the sequence between them too (sequence parallel): everything that is there for each
  token is divided. What they sum is gathered and scattered in plain sight: no arithmetic hides it.
- FSDP2's gathers and sums hide behind the arithmetic of the same pass, but for those of one layer; sums over replicas
  hide behind the last micro-batch's backward.
- What is sent between stages is waited for.
- The optimizer is one fused kernel: its step holds nothing beside its state.
- Stages follow a 1F1B schedule, interleaved where each has several chunks; the slowest one sets the pace.
- Neighbours in a node are first the devices that share layers, then replicas; stages are furthest apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from cost_models.roofline import RooflineCosts
from planner.extras.splits.stages import (
    ROW,
    Array,
    Kept,
    Share,
    Stage,
    Ways,
    Weights,
    accumulates,
    in_flight,
    resident,
    stages_of,
    ways_of,
    weights_of,
)
from planner.extras.splits.table import Layer, ModelTable, Work
from planner.extras.splits.types import FSDP2, OPTIMIZER, PARTS, REPLICATED, Estimate, Question, Split


class Timed(NamedTuple):
    """Seconds of one layer's share, and of what each of its choices runs again."""

    forward: float
    backward: float
    reruns: tuple[float, ...]


class Estimator:
    """Estimates splits of one model on one kind of device; what splits have in common is computed once."""

    def __init__(self, table: ModelTable, question: Question) -> None:
        self.table, self.question, self.links = table, question, question.links
        self.layers: tuple[Layer, ...] = (table.first, table.last, *table.kinds)
        self.roofline = RooflineCosts(question.device)
        self.stages = cache(partial(stages_of, table))
        self.weights = cache(partial(weights_of, table, self.layers))
        self.timed, self.ways, self.pace = cache(self._timed), cache(self._ways), cache(self._pace)

    def estimate(self, split: Split) -> Estimate:
        """Estimate a split; where it does not fit, that is with the lowest peak that it has."""
        count = split.micro_batches(self.question.global_batch)
        share = Share(split.micro_batch, split.tensor)
        stages = self.stages(split.pipeline, split.chunks)
        weights = [self.weights(stage, split.tensor, split.data) for stage in stages]
        held = [resident(each, split, count) for each in weights]
        kept = [
            self.ways(stage, share).best(
                self.question.memory_bytes - sum(here.values()), in_flight(split, index, count), split.engine
            )
            for index, (stage, here) in enumerate(zip(stages, held, strict=True))
        ]
        peaks = [sum(here.values()) + way.held_bytes for here, way in zip(held, kept, strict=True)]
        fullest = peaks.index(max(peaks))
        way = kept[fullest]
        saved = {"saved": way.held_bytes - way.working_bytes, "at work": way.working_bytes}
        return Estimate(
            split=split,
            seconds=self._seconds(split, share, stages, weights, kept),
            peak_bytes=peaks[fullest],
            memory_bytes={**held[fullest], **saved},
            stages=tuple(way.mixed for way in kept),
            tokens=self.question.global_batch * self.table.tokens,
            gpus=self.question.gpus,
            fits=peaks[fullest] <= self.question.memory_bytes,
        )

    def _ways(self, stage: Stage, share: Share) -> Ways:
        return ways_of(stage, self.layers, [self.timed(n, share).reruns for n in range(len(self.layers))], share)

    def _timed(self, number: int, share: Share) -> Timed:
        layer = self.layers[number]

        def seconds(works: Sequence[Work]) -> float:
            return self._work_seconds(works, share)

        return Timed(
            seconds(layer.forward),
            seconds(layer.backward),
            tuple(seconds(choice.reruns) for choice in layer.choices),
        )

    def _work_seconds(self, works: Sequence[Work], share: Share) -> float:
        def scaled(work: Work) -> Work:
            samples = share.micro_batch / share.tensor
            moved_bytes = int(work.moved_bytes * samples + work.weight_bytes / share.tensor)
            return replace(work, flops=int(work.flops * samples), moved_bytes=moved_bytes)

        costs = self.roofline.costs([scaled(work) for work in works])
        return sum(work.times * cost.seconds for work, cost in zip(works, costs, strict=True))

    def _pace(self, stage: Stage, share: Share) -> tuple[float, ...]:
        """Return a stage's seconds for a micro-batch: forward, backward, and sums over devices that share layers."""
        found = np.zeros(3)
        for number, count in Counter(stage).items():
            layer, timed = self.layers[number], self.timed(number, share)
            found += count * np.array([timed.forward, timed.backward, self._sums(layer, number, share)])
        return tuple(found)

    def _sums(self, layer: Layer, number: int, share: Share) -> float:
        """Return the time of sums over the devices that share a layer, forward and backward.

        A sum is scattered along the sequence, and gathered before what reads it; the backward gathers once more what
        the forward has kept a part of. Ends sum what they hand on: the embedding's rows, and what the head reads.
        """
        forward, backward = layer.summed_forward_bytes, layer.summed_backward_bytes
        if number < ROW:
            forward = backward = self.table.kinds[0].boundary_bytes
        return float(self.links.pass_seconds((3 * forward + 2 * backward) * share.micro_batch, share.tensor))

    def _seconds(
        self, split: Split, share: Share, stages: Sequence[Stage], weights: Sequence[Weights], kept: Sequence[Kept]
    ) -> dict[str, float]:
        """Put a step's time together: the slowest stage sets the pace, the others fill and drain the pipeline."""
        count = split.micro_batches(self.question.global_batch)
        forward, backward, tensor = np.array([self.pace(stage, share) for stage in stages]).T
        again = np.array([way.seconds for way in kept])
        resummed_bytes = 2 * np.array([way.summed_bytes for way in kept]) * share.micro_batch
        each, once = self._data(split, count, weights, forward, backward + again)
        sent = 0.0
        if split.pipeline > 1:
            sent_bytes = share.held(self.table.kinds[0].boundary_bytes)
            sent = 2 * split.chunks * self.links.send_seconds(sent_bytes, split.data * split.tensor)
        of_micro_batch = {
            "compute": forward + backward,
            "recompute": again,
            "tensor": tensor + self.links.pass_seconds(resummed_bytes, split.tensor),
            "data": each,
            "pipeline": np.full(len(stages), sent),
        }
        totals = np.sum(list(of_micro_batch.values()), axis=0)
        slowest = int(totals.argmax())
        found = dict.fromkeys(PARTS, 0.0) | {name: count * float(of[slowest]) for name, of in of_micro_batch.items()}
        found["data"] += float(once.max())
        found["bubble"] = float(totals.sum() - totals[slowest]) / split.chunks
        found["optimizer"] = max(self._update(split, one) for one in weights)
        return found

    def _data(
        self, split: Split, count: int, weights: Sequence[Weights], forward: Array, backward: Array
    ) -> tuple[Array, Array]:
        """Return what waits for other replicas on each stage: with each micro-batch, and once in a step."""
        none = np.zeros(len(weights))
        if split.data == 1:
            return none, none
        if not self.question.overlap:
            forward = backward = none
        whole = np.array([one.whole for one in weights])
        gather, reduce = (self.links.pass_seconds(whole[:, kind], split.data, split.tensor) for kind in (0, 1))
        units = max(1, len(self.table.row) // split.pipeline)

        def waits(seconds: Array, hidden_by: Array) -> Array:
            """Return what of a transfer shows: its first or last unit, and what is longer than the arithmetic."""
            shown: Array = np.maximum(seconds / units, seconds - hidden_by)
            return shown

        if split.sharding == REPLICATED:
            return none, waits(2 * reduce, backward)
        if split.sharding == OPTIMIZER:
            return none, waits(gather, forward) + waits(reduce, backward)
        ahead, back = waits(gather, forward), gather if split.sharding == FSDP2 else none
        each, once = (ahead, none) if split.sharding == FSDP2 else (none, ahead)
        if accumulates(split, count):
            return each + waits(back, backward), once + waits(reduce, backward)
        return each + waits(back + reduce, backward), once

    def _update(self, split: Split, weights: Weights) -> float:
        """Return the time of the optimizer's step: all that it reads and writes moves once each way."""
        is_whole = split.data == 1 or split.sharding == REPLICATED
        device = self.question.device
        rate = device.bandwidth_bytes_per_second * device.bandwidth_efficiency
        return 2 * sum(weights.whole if is_whole else weights.sharded) / rate
