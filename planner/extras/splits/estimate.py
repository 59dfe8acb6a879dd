"""How long a step takes under a split, and what each device holds.

What is assumed, beside the roofline's efficiencies:

- Devices that share layers share the sequence between them too (sequence parallel): everything that is there for each
  token is divided. What they sum is gathered and scattered in plain sight: no arithmetic hides it.
- Devices that share a sequence pass keys and values around while attention works on those that are there.
- FSDP2's gathers and sums hide behind the arithmetic of the same pass, but for those of one layer; sums over replicas
  hide behind the last micro-batch's backward.
- What is sent between stages, and to experts, is waited for. Experts are equally busy.
- The optimizer is one fused kernel: its step holds nothing beside its state.
- Stages follow a 1F1B schedule, interleaved where each has several chunks; the slowest one sets the pace.
- Neighbours in a node are first the devices that share layers, then those that share a sequence, then replicas; stages
  are furthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.extras.splits.stages import (
    ROW,
    Keeping,
    LayerClock,
    Share,
    Stage,
    StageChoices,
    Timed,
    Weights,
    choices_of,
    in_flight,
    resident,
    stages_of,
    weights_of,
)
from planner.extras.splits.table import Layer, ModelTable
from planner.extras.splits.types import FSDP2, FSDP2_KEPT, PARTS, REPLICATED, Estimate, Question, Split


@dataclass(frozen=True, slots=True)
class _Paced:
    """Seconds of a stage for one micro-batch, before what depends on sharding and recompute."""

    compute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    forward: float
    """Of the arithmetic, what is forward."""

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.context + self.expert + self.pipeline


class Estimator:
    """Estimates splits of one model on one kind of device; what splits have in common is computed once."""

    def __init__(self, table: ModelTable, question: Question) -> None:
        self.table, self.question, self.links = table, question, question.links
        self.clock = LayerClock(table, question.device, question.attention_efficiency)
        self.layers: tuple[Layer, ...] = self.clock.layers
        self._stages: dict[tuple[int, int], tuple[Stage, ...]] = {}
        self._paces: dict[tuple[object, ...], tuple[_Paced, ...]] = {}
        self._choices: dict[tuple[object, ...], StageChoices] = {}
        self._weights: dict[tuple[object, ...], tuple[Weights, ...]] = {}

    def share(self, split: Split) -> Share:
        """Return what a device has of a layer."""
        return Share(split.micro_batch, split.tensor, split.context, split.expert)

    def stages(self, split: Split) -> tuple[Stage, ...]:
        """Return the stages of a split's pipeline."""
        key = (split.pipeline, split.chunks)
        if key not in self._stages:
            self._stages[key] = stages_of(self.table, *key)
        return self._stages[key]

    def lower_bound_seconds(self, split: Split) -> float:
        """Return a time that no step of this split is below, whatever is sharded and run again."""
        totals = [pace.total for pace in self.paces(split)]
        return _paced(totals, split, self.question.global_batch) * (1 - 1e-12)

    def bound_parts(self, split: Split) -> dict[str, float]:
        """Return what that time is made of."""
        paces = self.paces(split)
        slowest = max(paces, key=lambda pace: pace.total)
        count = split.micro_batches(self.question.global_batch)
        parts = {
            name: count * getattr(slowest, name) for name in ("compute", "tensor", "context", "expert", "pipeline")
        }
        return {**parts, "bubble": self.lower_bound_seconds(split) - count * slowest.total}

    def state_bytes(self, split: Split) -> int:
        """Return what is resident on the fullest device, before any activation."""
        count = split.micro_batches(self.question.global_batch)
        return max(sum(resident(weights, split, count).values()) for weights in self.weights(split))

    def weights(self, split: Split) -> tuple[Weights, ...]:
        """Return the weights of each stage."""
        key = (*split.shape, split.chunks)
        if key not in self._weights:
            made = (weights_of(self.table, self.layers, stage, split) for stage in self.stages(split))
            self._weights[key] = tuple(made)
        return self._weights[key]

    def paces(self, split: Split) -> tuple[_Paced, ...]:
        """Return each stage's seconds for a micro-batch, as far as they depend on the degrees alone."""
        key = (*split.shape, split.micro_batch, split.chunks)
        if key not in self._paces:
            known: dict[object, _Paced] = {}
            made = []
            for stage in self.stages(split):
                alike = (stage.row, stage.is_first, stage.is_last)
                if alike not in known:
                    known[alike] = self._pace(stage, split)
                made.append(known[alike])
            self._paces[key] = tuple(made)
        return self._paces[key]

    def _pace(self, stage: Stage, split: Split) -> _Paced:
        share = self.share(split)
        forward = backward = tensor = context = expert = 0.0
        counts = {number: stage.all.count(number) for number in dict.fromkeys(stage.all)}
        for number, count in counts.items():
            layer, timed = self.layers[number], self.clock.timed(number, share)
            forward += count * timed.forward
            backward += count * timed.backward
            tensor += count * self._sums(layer, number, share)
            context += count * self._ring(layer, timed, share)
            expert += count * self._routing(layer, share)
        pipeline = 0.0
        if split.pipeline > 1:
            distance = split.data * split.tensor * split.context
            sent_bytes = share.held(self.table.kinds[0].boundary_bytes)
            pipeline = 2 * split.chunks * self.links.send_seconds(sent_bytes, distance)
        return _Paced(forward + backward, tensor, context, expert, pipeline, forward)

    def _sums(self, layer: Layer, number: int, share: Share) -> float:
        """Return the time of sums over the devices that share a layer, forward and backward.

        A sum is scattered along the sequence, and gathered before what reads it; the backward gathers once more what
        the forward has kept a part of. Ends sum what they hand on: the embedding's rows, and what the head reads.
        """
        forward, backward = layer.summed_forward_bytes, layer.summed_backward_bytes
        if number < ROW:
            forward = backward = self.table.kinds[0].boundary_bytes
        size_bytes = (2 * forward + 2 * backward + forward) * share.tokens
        return self._shared(size_bytes, share.tensor)

    def _shared(self, size_bytes: float, tensor: int) -> float:
        return self.links.pass_seconds(size_bytes, tensor)

    def _ring(self, layer: Layer, timed: Timed, share: Share) -> float:
        """Return how long attention waits for keys and values: they pass once forward; with their gradients, back."""
        if share.context == 1 or not layer.ring_bytes:
            return 0.0
        steps = share.context - 1
        sent_bytes = share.held(layer.ring_bytes)
        reach = share.tensor * share.context
        once = steps * self.links.send_seconds(sent_bytes, share.tensor if reach <= self.links.node_devices else reach)
        forward = max(0.0, once - timed.attention_forward)
        return forward + max(0.0, 2 * once - timed.attention_backward)

    def _routing(self, layer: Layer, share: Share) -> float:
        """Return the time of sending tokens to experts and back, forward and backward."""
        if share.expert == 1 or not layer.routed_bytes:
            return 0.0
        return 4 * self.links.exchange_seconds(share.held(layer.routed_bytes), share.expert, share.tensor)

    def estimate(self, split: Split) -> Estimate:
        """Estimate a split; where it does not fit, that is with the lowest peak that it has."""
        count = split.micro_batches(self.question.global_batch)
        share, paces, stages = self.share(split), self.paces(split), self.stages(split)
        memory_bytes = self.question.memory_bytes
        kept: list[Keeping] = []
        fullest: tuple[int, dict[str, int]] = (-1, {})
        fits = True
        for stage, weights in zip(stages, self.weights(split), strict=True):
            held = resident(weights, split, count)
            state_bytes = sum(held.values())
            flying = in_flight(split, stage.index, count)
            choices = self._choices_of(stage, share)
            found = choices.cheapest(memory_bytes - state_bytes, flying, split.engine)
            way = found or choices.lowest(flying, split.engine)
            kept.append(way)
            activations = way.bytes_beside(flying)
            peak_bytes = state_bytes + activations
            fits = fits and peak_bytes <= memory_bytes
            if peak_bytes > fullest[0]:
                saved = activations - way.working_bytes
                fullest = peak_bytes, {**held, "saved": saved, "at work": way.working_bytes}
        return Estimate(
            split=split,
            seconds=self._seconds(split, count, paces, kept),
            peak_bytes=fullest[0],
            memory=fullest[1],
            stages=tuple(way.mixed for way in kept),
            tokens=self.question.global_batch * self.table.tokens,
            gpus=self.question.gpus,
            fits=fits,
        )

    def _choices_of(self, stage: Stage, share: Share) -> StageChoices:
        key = (stage.row, stage.is_first, stage.is_last, share)
        if key not in self._choices:
            self._choices[key] = choices_of(stage, self.clock, share, self.table.choices)
        return self._choices[key]

    def _seconds(self, split: Split, count: int, paces: tuple[_Paced, ...], kept: list[Keeping]) -> dict[str, float]:
        """Put a step's time together: the slowest stage sets the pace, the others fill and drain the pipeline."""
        share = self.share(split)
        again = [way.seconds for way in kept]
        resums = [self._shared(2 * way.summed_bytes * share.tokens, split.tensor) for way in kept]
        steps = [self._data(split, pace, way, weights, count)
                 for pace, way, weights in zip(paces, kept, self.weights(split), strict=True)]  # fmt: skip
        totals = [
            pace.total + more + resum + each
            for pace, more, resum, (each, _) in zip(paces, again, resums, steps, strict=True)
        ]
        at = max(range(len(totals)), key=totals.__getitem__)
        pace = paces[at]
        parts = dict.fromkeys(PARTS, 0.0)
        parts |= {
            "compute": count * pace.compute,
            "recompute": count * again[at],
            "tensor": count * (pace.tensor + resums[at]),
            "context": count * pace.context,
            "expert": count * pace.expert,
            "pipeline": count * pace.pipeline,
            "data": count * steps[at][0] + max(once for _, once in steps),
            "optimizer": max(self._update(split, weights) for weights in self.weights(split)),
        }
        parts["bubble"] = _paced(totals, split, self.question.global_batch) - count * totals[at]
        return parts

    def _data(self, split: Split, pace: _Paced, way: Keeping, weights: Weights, count: int) -> tuple[float, float]:
        """Return what waits for other replicas: with each micro-batch, and once in a step."""
        if split.shards == 1:
            return 0.0, 0.0
        stride = split.tensor
        gather = self.links.pass_seconds(weights.parameters, split.shards, stride)
        reduce = self.links.pass_seconds(weights.gradients, split.shards, stride)
        forward = pace.forward if self.question.overlap else 0.0
        backward = pace.compute - pace.forward + way.seconds if self.question.overlap else 0.0
        row = max(1, len(self.table.row) // split.pipeline)
        if split.sharding not in (FSDP2, FSDP2_KEPT):
            spread = _waits(gather, forward, row) if split.sharding != REPLICATED else 0.0
            summed = reduce if split.sharding != REPLICATED else 2 * reduce
            return 0.0, spread + _waits(summed, backward, row)
        each = once = 0.0
        if split.sharding == FSDP2:
            each += _waits(gather, forward, row)
        else:
            once += _waits(gather, forward, row)
        back = gather if split.sharding == FSDP2 else 0.0
        accumulates = split.pipeline > 1 and count > 1
        if accumulates:
            each += _waits(back, backward, row)
            once += _waits(reduce, backward, row)
        else:
            each += _waits(back + reduce, backward, row)
        return each, once

    def _update(self, split: Split, weights: Weights) -> float:
        """Return the time of the optimizer's step: all that it reads and writes moves once each way."""
        is_whole = split.shards == 1 or split.sharding == REPLICATED
        sizes = (
            (weights.parameters, weights.gradients, weights.optimizer)
            if is_whole
            else (weights.sharded_parameters, weights.sharded_gradients, weights.sharded_optimizer)
        )
        device = self.question.device
        return 2 * sum(sizes) / (device.bandwidth_bytes_per_second * device.bandwidth_efficiency)


def _paced(totals: list[float], split: Split, global_batch: int) -> float:
    """Return the time of all micro-batches through a pipeline: the slowest stage never waits, the others do."""
    slowest = max(totals)
    rest = sum(sorted(totals)[:-1])
    return split.micro_batches(global_batch) * slowest + rest / split.chunks


def _waits(seconds: float, hidden_by: float, units: int) -> float:
    """Return what of a transfer shows: that of its first or last unit, and what is longer than the arithmetic."""
    return max(seconds / units, seconds - hidden_by)
