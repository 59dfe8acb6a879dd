"""The devices of a pipeline under a split: which layers each has, what is resident there, and what it keeps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import ceil

from cost_models.base import OperationCost
from cost_models.devices import DeviceSpec
from cost_models.roofline import RooflineCosts, share_of_products
from planner.extras.pipelines.schedules import warm_up_of
from planner.extras.splits.table import FULL, KEEP, Layer, ModelTable, Work
from planner.extras.splits.types import FSDP2, FSDP2_KEPT, OPTIMIZER, REPLICATED, Mixed, Split


@dataclass(frozen=True, slots=True)
class Share:
    """What a device has of a layer: samples over devices that share one sequence, and shares of its weights."""

    micro_batch: int
    tensor: int
    context: int
    expert: int

    @property
    def tokens(self) -> float:
        """Of one sample's tokens, all that a group of devices which share layers has."""
        return self.micro_batch / self.context

    def held(self, size_bytes: int) -> int:
        """Return what a device holds of so many bytes of a sample: devices that share layers divide its tokens too."""
        return -(-size_bytes * self.micro_batch // (self.context * self.tensor))


@dataclass(frozen=True, slots=True)
class Operands:
    """One operation as a cost model reads it."""

    name: str
    target: str
    flops: int
    moved_bytes: int
    dtype: str
    signature: str = ""


@dataclass(frozen=True)
class Timed:
    """Seconds of one layer's share, and of what each of its choices runs again."""

    forward: float
    backward: float
    attention_forward: float
    attention_backward: float
    reruns: tuple[float, ...]


class LayerClock:
    """Asks the roofline of a device how long shares of layers take."""

    def __init__(self, table: ModelTable, device: DeviceSpec, attention_efficiency: float | None = None) -> None:
        self.device = device
        self.attention_efficiency = attention_efficiency
        self.layers = (table.first, table.last, *table.kinds)
        self.costs = RooflineCosts(device)
        self._known: dict[tuple[int, Share], Timed] = {}

    def timed(self, number: int, share: Share) -> Timed:
        """Return the seconds of the first layer (0), of the last (1), or of a kind of the row (2 and on)."""
        found = self._known.get((number, share))
        if found is None:
            found = self._known[number, share] = self._timed(self.layers[number], share)
        return found

    def _timed(self, layer: Layer, share: Share) -> Timed:
        forward, backward = (self._seconds(works, share) for works in (layer.forward, layer.backward))
        ahead, back = (
            self._seconds([work for work in works if work.is_attention], share)
            for works in (layer.forward, layer.backward)
        )
        reruns = tuple(self._seconds(choice.reruns, share) for choice in layer.choices)
        return Timed(forward, backward, ahead, back, reruns)

    def _seconds(self, works: Sequence[Work], share: Share) -> float:
        costs: Sequence[OperationCost] = self.costs.costs([self._scaled(work, share) for work in works])
        return sum(work.times * cost.seconds for work, cost in zip(works, costs, strict=True))

    def _scaled(self, work: Work, share: Share) -> Operands:
        weights = share.tensor * (share.expert if work.of_experts else 1)
        tokens = share.tokens / share.tensor
        slower = 1.0
        if work.is_attention and self.attention_efficiency is not None:
            known = self.device.compute_efficiency * share_of_products(work.target, work.dtype, self.device)
            slower = known / self.attention_efficiency
        return Operands(
            name="",
            target=work.target,
            flops=int(work.flops * tokens * slower),
            moved_bytes=int(work.moved_bytes * tokens + work.weight_bytes / weights),
            dtype=work.dtype,
        )


FIRST, LAST, ROW = 0, 1, 2
"""What a clock calls the first layer and the last one, and the first kind of the row."""


def can_cut(layers: int, groups: int) -> bool:
    """Whether a row can be cut so that engines can be told: in equal groups, or with one layer less at both ends.

    >>> can_cut(32, 4), can_cut(126, 8), can_cut(32, 5)
    (True, True, False)
    """
    return groups <= layers and (layers % groups == 0 or (groups > 2 and (layers + 2) % groups == 0))


def has_short_ends(layers: int, groups: int) -> bool:
    """Whether the first group and the last have one layer less than the others, for what stands beside the row."""
    return layers % groups != 0 and groups > 2


def cut_row(layers: int, pipeline: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each device, in groups that are as equal as :func:`can_cut` says.

    >>> cut_row(6, 4, 1), cut_row(4, 2, 2)
    (((0,), (1, 2), (3, 4), (5,)), ((0, 2), (1, 3)))
    """
    groups = pipeline * chunks
    each, over = divmod(layers + 2 * has_short_ends(layers, groups), groups)
    # What engines cannot be told, and still may be estimated: inner groups have what is left over.
    sizes = [each + (0 < index <= over) for index in range(groups)]
    if has_short_ends(layers, groups):
        sizes[0] -= 1
        sizes[-1] -= 1
    ends = list(accumulate(sizes))
    rows = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return tuple(tuple(layer for row in rows[device::pipeline] for layer in row) for device in range(pipeline))


def in_flight(split: Split, stage: int, micro_batches: int) -> float:
    """Return how many micro-batches a stage holds at most, the one at work included.

    Of an interleaved pipeline they are passes through one chunk, as shares of the device's layers.
    """
    chunks = split.chunks
    return min(warm_up_of(split.pipeline, stage, chunks) + 1, micro_batches * chunks) / chunks


@dataclass(frozen=True)
class Stage:
    """A device of a pipeline: its layers, by the number that the clock has for their kinds."""

    index: int
    row: tuple[int, ...]
    is_first: bool
    is_last: bool

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """What it has beside layers of the row."""
        return (FIRST,) * self.is_first + (LAST,) * self.is_last

    @property
    def all(self) -> tuple[int, ...]:
        """All that it has."""
        return (*self.row, *self.ends)


def stages_of(table: ModelTable, pipeline: int, chunks: int) -> tuple[Stage, ...]:
    """Cut a model into the stages of a pipeline."""
    rows = cut_row(len(table.row), pipeline, chunks)
    return tuple(
        Stage(index, tuple(ROW + table.row[layer] for layer in row), index == 0, index == pipeline - 1)
        for index, row in enumerate(rows)
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of a stage's weights on one device before any is sharded, and over how many shards what has of them."""

    parameters: int
    gradients: int
    optimizer: int
    sharded_parameters: int
    sharded_gradients: int
    sharded_optimizer: int
    largest_layer: int
    """Parameters of one layer of the row."""
    ends: int
    """Parameters of what is there beside the row."""


def weights_of(table: ModelTable, layers: Sequence[Layer], stage: Stage, split: Split) -> Weights:
    """Count the weights of a stage, shared by the devices of a layer, and what one shard has of them."""
    totals = {"parameter": 0.0, "gradient": 0.0, "optimizer": 0.0}
    sharded = dict(totals)
    largest = ends = 0.0
    expert_shards = max(split.shards // split.expert, 1)
    for number in stage.all:
        layer = layers[number]
        dense, routed = 1 - layer.expert_share, layer.expert_share / split.expert
        for kind in totals:
            whole = getattr(layer, f"{kind}_bytes") / split.tensor
            totals[kind] += whole * (dense + routed)
            sharded[kind] += whole * (dense / split.shards + routed / expert_shards)
        here = layer.parameter_bytes / split.tensor * (dense + routed)
        if number >= ROW:
            largest = max(largest, here)
        else:
            ends += here
    if stage.is_first and stage.is_last and table.tied_bytes:
        # What both ends hold is there once.
        share = table.tied_bytes / split.tensor / max(table.last.parameter_bytes / split.tensor, 1)
        for kind in totals:
            of_last = getattr(table.last, f"{kind}_bytes") / split.tensor * share
            totals[kind] -= of_last
            sharded[kind] -= of_last / split.shards
        ends -= table.tied_bytes / split.tensor
    return Weights(
        parameters=ceil(totals["parameter"]),
        gradients=ceil(totals["gradient"]),
        optimizer=ceil(totals["optimizer"]),
        sharded_parameters=ceil(sharded["parameter"]),
        sharded_gradients=ceil(sharded["gradient"]),
        sharded_optimizer=ceil(sharded["optimizer"]),
        largest_layer=ceil(largest),
        ends=ceil(ends),
    )


def resident(weights: Weights, split: Split, micro_batches: int) -> dict[str, int]:
    """Return what is resident on a device of a stage, by kind.

    Gradients of a pipeline are whole until its last micro-batch, so that they are reduced once. FSDP2 gathers what is
    in no layer, and two layers at a time, and has what their gradients need before they are spread; DDP has a copy of
    all gradients in its buckets.
    """
    spread = split.sharding if split.shards > 1 else ""
    is_sharded = spread in (FSDP2, FSDP2_KEPT)
    accumulates = split.pipeline > 1 and micro_batches > 1
    gathered = 0
    if is_sharded:
        unit = max(weights.ends, weights.largest_layer)
        gathered = weights.ends + 2 * weights.largest_layer + 2 * unit
        if spread == FSDP2_KEPT:
            gathered = weights.parameters + 2 * unit
    elif spread == REPLICATED and split.engine == "torchtitan":
        gathered = weights.gradients
    is_shared = is_sharded or spread == OPTIMIZER
    return {
        "parameters": weights.sharded_parameters if is_sharded else weights.parameters,
        "gradients": weights.sharded_gradients if is_sharded and not accumulates else weights.gradients,
        "optimizer": weights.sharded_optimizer if is_shared else weights.optimizer,
        "communication": gathered,
    }


@dataclass(frozen=True)
class Keeping:
    """What a stage keeps, what that takes, and what it runs again."""

    mixed: Mixed
    saved_bytes: int
    """Of one micro-batch."""
    saved_once_bytes: int
    """What the last layer saves: of one micro-batch alone, whose backward comes at once."""
    working_bytes: int
    seconds: float
    """Run again for a micro-batch."""
    summed_bytes: int
    """Of one sample, summed again."""

    def bytes_beside(self, flying: float) -> int:
        """Return what stands beside what is resident, with so many micro-batches in flight."""
        return ceil(self.saved_bytes * flying) + self.saved_once_bytes + self.working_bytes


@dataclass
class StageChoices:
    """All that a stage can keep under one share: its first layers by one choice, the others by another."""

    stage: Stage
    layers: Sequence[Layer]
    timed: Sequence[Timed]
    """Of all that it has, in the order of ``stage.all``."""
    share: Share
    names: tuple[str, ...]
    _found: dict[str, list[list[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choices = range(len(self.names))
        row, timed = [self.layers[number] for number in self.stage.row], self.timed[: len(self.stage.row)]

        def sums(of: Sequence[Sequence[float]]) -> list[list[float]]:
            return [[0, *accumulate(column)] for column in of]

        self.saved = sums([[self.share.held(layer.choices[c].saved_bytes) for layer in row] for c in choices])
        self.again = sums([[one.reruns[c] for one in timed] for c in choices])
        self.summed = sums([[layer.choices[c].summed_bytes for layer in row] for c in choices])
        self.working = [max((self._working(layer, c) for layer in row), default=0) for c in choices]
        ends = [self.layers[number] for number in self.stage.ends]
        first, last = (
            sum(
                self.share.held(self.layers[number].choices[0].saved_bytes)
                for number in self.stage.ends
                if number == end
            )
            for end in (FIRST, LAST)
        )
        self.first_saved, self.last_saved = first, last
        self.ends_working = max((self._working(layer, 0) for layer in ends), default=0)

    def _working(self, layer: Layer, choice: int) -> int:
        gathered = 0
        if self.share.tensor > 1:  # what is summed and scattered along the sequence is there whole for a moment
            whole = -(-layer.boundary_bytes * self.share.micro_batch // self.share.context)
            gathered = whole - self.share.held(layer.boundary_bytes)
        return self.share.held(layer.choices[choice].working_bytes) + gathered

    def keeping(self, first: int, others: int, count: int) -> Keeping:
        """Return what it takes to keep the first layers, so many, by one choice, and the others by another."""
        size = len(self.stage.row)
        used = [self.working[first]] * (count > 0) + [self.working[others]] * (count < size)

        def mix(of: list[list[float]]) -> float:
            return of[first][count] + (of[others][size] - of[others][count])

        return Keeping(
            Mixed(layers=size, first=self.names[first], others=self.names[others], count=count),
            int(mix(self.saved)) + self.first_saved,
            self.last_saved,
            max(self.ends_working, *used, 0),
            mix(self.again),
            int(mix(self.summed)),
        )

    def allowed(self, engine: str) -> list[int]:
        """Return the choices that an engine has: Megatron's layers run again as a whole, or not at all."""
        return [c for c, name in enumerate(self.names) if engine != "megatron" or name in (KEEP, FULL)]

    def cheapest(self, room_bytes: int, flying: float, engine: str) -> Keeping | None:
        """Return what fits and runs least again; None if nothing fits."""
        best: Keeping | None = None
        for found in self._least(room_bytes, flying, engine):
            if best is None or (found.seconds, found.bytes_beside(flying)) < (best.seconds, best.bytes_beside(flying)):
                best = found
        return best

    def _least(self, room_bytes: int, flying: float, engine: str) -> Iterator[Keeping]:
        allowed, size = self.allowed(engine), len(self.stage.row)
        whole = self.keeping(0, 0, 0)
        if whole.bytes_beside(flying) <= room_bytes:
            yield whole
            return
        for position, others in enumerate(allowed):
            for first in allowed[position + 1 :]:

                def fits(count: int, first: int = first, others: int = others) -> bool:
                    return self.keeping(first, others, count).bytes_beside(flying) <= room_bytes

                # What is saved falls with each layer; what is at work rises once, with the first, and falls at the end.
                count = bisect_left(range(1, size), True, key=fits) + 1
                for candidate in (count, size):
                    if candidate <= size and fits(candidate):
                        yield self.keeping(first, others, candidate)
                        break

    def lowest(self, flying: float, engine: str) -> Keeping:
        """Return what takes fewest bytes."""
        allowed, size = self.allowed(engine), len(self.stage.row)
        ways = [self.keeping(choice, 0, size) for choice in allowed]
        return min(ways, key=lambda way: (way.bytes_beside(flying), way.seconds))


def choices_of(stage: Stage, clock: LayerClock, share: Share, names: tuple[str, ...]) -> StageChoices:
    """Return what a stage can keep under a share."""
    timed = [clock.timed(number, share) for number in stage.all]
    return StageChoices(stage, clock.layers, timed, share, names)
