"""What FSDP2 does around units that are sharded one by one: gathers, frees, and spreads gradients.

This follows ``torch.distributed.fsdp.fully_shard`` on each block and on the model, with its default prefetching: in
the forward the buffer of one gather lives until the next unit is gathered; in the backward the next block is gathered
before the current one runs; the buffer of one reduce-scatter lives until the next. A unit that is told to
(``reshard_after_forward=False``) stays gathered between its forward and its backward. What a unit's backward recomputes
finds its parameters gathered, so recompute needs no further gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from planner.common.units import round_up
from planner.ir.graph import Value
from planner.ir.static_memory import StaticMemory

ROOT = ""
"""The unit of all parameters that are in no block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter as sharding sees it: split along its first dimension, padded to be even."""

    shape: tuple[int, ...]
    item_bytes: int
    """Of what is gathered, and computed with."""
    share_item_bytes: int
    """Of the rank's share, and of its gradient."""
    spread_item_bytes: int
    """Of the gradient as it is spread."""
    trainable: bool

    def padded(self, ranks: int) -> int:
        """Return its elements over all ranks."""
        first = self.shape[0] if self.shape else 1
        return -(-first // ranks) * ranks * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered together."""

    parameters: Sequence[Parameter]
    stays: bool = False
    """Whether they stay gathered after the forward, until their gradients are spread."""
    copies: bool = False
    """Whether other ranks have the same shares (HSDP): gradients are then summed over these too."""
    ahead: Sequence[str] = ()
    """Units that are gathered ahead as its forward begins."""
    ahead_in_backward: Sequence[str] | None = None
    """Those as its backward begins; None for the one whose backward comes next."""


Units = Mapping[str, Unit]
"""By the paths of the modules around whose forward they are gathered; :data:`ROOT` for the model's own."""


def resident(around: StaticMemory, units: Units, alignment_bytes: int) -> StaticMemory:
    """Count padded shards, and no buffers for communication: those come and go within the step."""
    ranks = around.gradient_shards
    shards = [p.padded(ranks) // ranks * p.share_item_bytes for unit in units.values() for p in unit.parameters]
    static = dict(around.static_bytes)
    static.pop("communication buffers", None)
    static["parameters"] = sum(round_up(size_bytes, alignment_bytes) for size_bytes in shards)
    return replace(around, static_bytes=static)


class Builder(Protocol):
    """What a step is built by, as far as sharding adds to it."""

    values: list[Value]

    def aligned(self, size_bytes: int) -> int:
        """Round a size up as the allocator does."""

    def add_value(self, name: str, size_bytes: int, *, kind: str = ..., retained: bool = ...) -> int:
        """Add a value, and give its index."""

    def add_once(self, target: str, module: str, reads: Iterable[int], makes: Iterable[int] = ()) -> Any:
        """Add an operation that never runs again."""


class Sharding:
    """Adds to a step, where that stands, what FSDP2 allocates for its units."""

    def __init__(self, builder: Builder, units: Units, ranks: int) -> None:
        self.builder, self._add = builder, builder.add_once
        self.units = {path: unit for path, unit in units.items() if unit.parameters}
        self.ranks = ranks
        self.gradients: dict[str, list[int]] = {path: [] for path in self.units}
        self.buffers: dict[str, int] = {}
        """What gathers that nobody has waited for wrote into, by unit."""
        self.last_gathered: list[int] = []
        """What the last gather of the forward wrote into, which is there until the next."""
        self.gathered: dict[str, int] = {}
        self.order: list[str] = []
        """Units in the order in which their forwards end."""
        self.last_reduced: list[int] = []

    def before_forward(self, path: str) -> None:
        """Gather a unit; before all of them what belongs to none, for the whole step."""
        if path not in self.units:
            return
        self._all_gather(path)
        self._add("free the gather before", path, self.last_gathered)
        self._copy_out(path, [self.buffers[path]])
        self.last_gathered = [self.buffers.pop(path)]
        for other in self.units[path].ahead:
            self._all_gather(other)

    def after_forward(self, path: str) -> None:
        """Free a unit's parameters; its gather's buffer stays until the next unit is gathered."""
        if path not in self.units:
            return
        if not self.units[path].stays:
            self._add("reshard", path, [self.gathered.pop(path)])
        self.order.append(path)

    def end_forward(self) -> None:
        """Free the last buffer of the forward."""
        self.after_forward(ROOT)
        self._add("free the last gather", ROOT, self.last_gathered)
        self.last_gathered = []

    def begin_backward(self) -> None:
        """Gather the last unit ahead: the model's own hook does so as soon as the loss has its gradient."""
        self.before_backward(ROOT)

    def before_backward(self, path: str) -> None:
        """Gather a unit that is not, and the one whose backward comes next."""
        if path not in self.units:
            return
        if path not in self.gathered:
            self._all_gather(path)
            self._copy_out(path, [])
            self._add("free the gather", path, [self.buffers.pop(path)])
        place, ahead = self.order.index(path), self.units[path].ahead_in_backward
        for other in self.order[max(place - 1, 0) : place] if ahead is None else ahead:
            self._all_gather(other)

    def after_backward(self, path: str, gradients: Iterable[int], *, input_has_gradient: bool) -> None:
        """Spread a unit's gradients; where its input needs none, that waits for the end of the backward."""
        if path not in self.units:
            return
        self.gradients[path] += gradients
        if input_has_gradient:
            self._reduce(path)

    def end(self, gradients: Iterable[int]) -> None:
        """Spread what is left."""
        if ROOT in self.gathered:
            self.after_backward(ROOT, gradients, input_has_gradient=True)
        for path in list(self.gathered):
            self._reduce(path)

    def _all_gather(self, path: str) -> None:
        if path in self.buffers or path in self.gathered or path not in self.units:
            return
        size_bytes = sum(p.padded(self.ranks) * p.item_bytes for p in self.units[path].parameters)
        self.buffers[path] = self._make("all-gather", path, size_bytes, "gathered parameters")

    def _copy_out(self, path: str, reads: Sequence[int]) -> None:
        aligned = [self.builder.aligned(p.padded(self.ranks) * p.item_bytes) for p in self.units[path].parameters]
        made = self._make("parameters", path, sum(aligned), "gathered parameters", reads=[*reads, self.buffers[path]])
        self.gathered[path] = made

    def _reduce(self, path: str) -> None:
        self._add("reshard", path, [self.gathered.pop(path)])
        trainable = [p for p in self.units[path].parameters if p.trainable]
        self._add("free the reduce-scatter before", path, self.last_reduced)
        size_bytes = sum(p.padded(self.ranks) * p.spread_item_bytes for p in trainable)
        own_bytes = sum(p.padded(self.ranks) // self.ranks * p.share_item_bytes for p in trainable)
        buffer = self._make("gradients to be spread", path, size_bytes, "gradients", reads=self.gradients[path])
        share = self.builder.add_value(f"{path} share", own_bytes, kind="gradient", retained=True)
        self.last_reduced = [buffer]
        if own_bytes * self.ranks == size_bytes:
            self._add("reduce-scatter", path, [buffer], [share])
            return
        spread = self._make("spread gradients", path, size_bytes // self.ranks, "gradients", reads=[buffer])
        self._add("cast the share", path, [spread], [share])
        if self.units[path].copies:
            self.last_reduced.append(spread)

    def _make(self, target: str, path: str, size_bytes: int, kind: str, reads: Sequence[int] = ()) -> int:
        value = self.builder.add_value(f"{target} of {path}.{len(self.builder.values)}", size_bytes, kind=kind)
        self._add(target, path, reads, [value])
        return value
