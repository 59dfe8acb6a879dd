"""Seconds and bytes of a layer's share under a split: each of them is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.base import OperationCost
from cost_models.devices import DeviceSpec
from cost_models.roofline import RooflineCosts, share_of_products
from planner.analysis.splits.table import Layer, ModelTable, Work


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
