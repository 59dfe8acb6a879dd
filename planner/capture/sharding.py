"""Add FSDP2's memory to a step: all-gathers, resharding and reduce-scatters of its units.

This follows ``torch.distributed.fsdp.fully_shard`` on each block and on the model, with its default prefetching: in
the forward the buffer of one gather lives until the next unit is gathered; in the backward the next block is gathered
before the current one runs; the buffer of one reduce-scatter lives until the next. A unit that is told to
(``reshard_after_forward=False``) stays gathered between its forward and its backward. What a unit's backward
recomputes finds its parameters gathered, so recompute needs no further gather.

Gradients that are not sent yet stay whole, in the type in which they will be; those of later backwards are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.common.units import round_up
from planner.ir.builder import GraphBuilder, StepContext
from planner.ir.graph import FOUND_TARGET, Phase
from planner.ir.static_memory import StaticMemory

_GLOO_NUMBER_BYTES = 16
"""What gloo divides sums by takes so much."""

ROOT = ""
"""The unit of all parameters that are in no block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A sharded parameter: split along its first dimension, with padding."""

    name: str
    """Its path in the model."""
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

    @property
    def is_cast_to_be_spread(self) -> bool:
        """Whether its gradient is spread in another type than it is computed in."""
        return self.spread_item_bytes != self.item_bytes


GATHERED, WHOLE, SHARES = "gathered parameters", "whole gradients", "shares of gradients"
"""What a step may find of earlier ones."""

Found = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered together."""

    path: str = ROOT
    """Of the first of its modules."""
    modules: Sequence[Any] = ()
    """Around whose forwards they are gathered."""
    parameters: Sequence[Parameter]
    stays: bool = False
    """Whether they stay gathered after the forward, until their gradients are spread."""
    copies: bool = False
    """Whether other ranks have the same shares (HSDP): gradients are then summed over these too."""
    is_on_host: bool = False
    """Whether shares, of parameters and of gradients, are in the memory of the host, which is not the device's."""
    sends: bool = True
    """Whether its gradients are spread in this backward; else they stay whole, to be in a later one."""
    finds: Found = frozenset()
    """What earlier steps have left."""

    def as_planned(self, *, finds_gradients: bool) -> Unit:
        """Return the unit with what a step is planned to find: gradients are left out, or there for certain."""
        finds = self.finds if finds_gradients else self.finds - {WHOLE, SHARES}
        if finds_gradients and finds.isdisjoint((WHOLE, SHARES)):
            finds |= {SHARES if self.sends else WHOLE}
        return replace(self, finds=finds)

    @property
    def trainable(self) -> list[Parameter]:
        """Those of its parameters that have gradients."""
        return [parameter for parameter in self.parameters if parameter.trainable]

    @property
    def spreads(self) -> bool:
        """Whether gradients do not stay as the backward makes them."""
        return self.sends or any(parameter.is_cast_to_be_spread for parameter in self.trainable)


Units = Mapping[str, Unit]
"""By their paths; :data:`ROOT` is the model's own."""


def spread_gradients(units: Units, gradients: Mapping[str, int]) -> set[int]:
    """Return those of the gradients of parameters, by their names, that FSDP2 spreads and then frees."""
    names = {parameter.name for unit in units.values() if unit.spreads for parameter in unit.trainable}
    return {gradient for name, gradient in gradients.items() if name in names}


def resident(around: StaticMemory, units: Units, alignment_bytes: int) -> StaticMemory:
    """Count padded shards, and no buffers for communication: those come and go within the step.

    What is on the host takes nothing; there the optimizer works where all shards are.
    """
    ranks = around.gradient_shards
    here = [unit for unit in units.values() if not unit.is_on_host]
    shards = [p.padded(ranks) // ranks * p.share_item_bytes for unit in here for p in unit.parameters]
    static = dict(around.static_bytes)
    static.pop("communication buffers", None)
    static["parameters"] = sum(round_up(size_bytes, alignment_bytes) for size_bytes in shards)
    around = replace(around, static_bytes=static, tensor_bytes=(sum(static.values()) - static.get("reserve", 0),))
    if not here:
        around = replace(around.without("optimizer", "master weights", "gradients"), optimizer_step_bytes=0)
    return around


class StepBuilder(GraphBuilder[Any]):
    """Adds the operations of a recorded step, and FSDP2's beside them."""

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self.sharding: Sharding | None = None

    def shard(self, units: Units, gradient_of: Callable[[str], int | None]) -> None:
        """Let FSDP2 shard the step's parameters; for ``gradient_of`` see :class:`Sharding`."""
        self.sharding = Sharding(self, units, self.context.gradient_shards, gradient_of)

    def add_once(self, target: str, module: str, reads: Iterable[int], makes: Iterable[int] = (), **facts: Any) -> int:
        """Add an operation that runs once."""
        name = f"{module}.{target}.{len(self.operations)}".lstrip(".")
        return self.add(target, reads, makes, name=name, module=module, recomputable=False, **facts)

    def add_turn(self, unit: str, is_entered: bool, reads: Iterable[int]) -> int:
        """Add what FSDP2 does as the forward or backward of a unit begins or ends, and what lives until then."""
        if self.sharding:
            self.sharding.turn(unit, is_entered=is_entered, is_forward=self.phase is Phase.FORWARD)
        return self.add_once("turn", unit, reads)


class Sharding:
    """Adds FSDP2's allocations for its units to the step being built.

    ``gradient_of`` gives the value that holds the gradient of a parameter, by its name; None as long as there is none.
    """

    def __init__(
        self, builder: StepBuilder, units: Units, ranks: int, gradient_of: Callable[[str], int | None]
    ) -> None:
        self.builder, self._add = builder, builder.add_once
        self.units = {path: unit for path, unit in units.items() if unit.parameters}
        self.ranks = ranks
        self.gradient_of = gradient_of
        self.buffers: dict[str, int] = {}
        """What gathers that nobody has waited for wrote into, by unit."""
        self.last_gathered: list[int] = []
        """What the last gather of the forward wrote into, which is there until the next."""
        self.gathered: dict[str, list[int]] = {}
        self.earlier: dict[str, int] = {}
        """Whole gradients of earlier backwards that those of this one are added to by FSDP2, by parameter."""
        self.order: list[str] = []
        """Units in the order in which their forwards end."""
        self.last_reduced: list[int] = []
        self.until_end: list[int] = []
        """What was summed over copies: it is there until the backward ends."""

    def begin(self) -> None:
        """Find what earlier steps have left, and gather what belongs to no block, for the whole step."""
        for path, unit in self.units.items():
            if GATHERED in unit.finds:
                self.gathered[path] = [self._make(FOUND_TARGET, path, self._gathered_bytes(unit), GATHERED)]
            if SHARES in unit.finds and not unit.is_on_host:
                self._make(FOUND_TARGET, path, self._share_bytes(unit), "gradient", retained=True)
            if WHOLE in unit.finds:
                for parameter in unit.trainable:
                    if self.gradient_of(parameter.name) is None:
                        self.earlier[parameter.name] = self._whole(FOUND_TARGET, path, unit, parameter)
        self.before_forward(ROOT)

    def turn(self, path: str, *, is_entered: bool, is_forward: bool) -> None:
        """Do what stands where a unit's forward or backward begins, or is over; the root's are those of the step."""
        if is_forward and path == ROOT:
            (self.begin if is_entered else self.end_forward)()
        elif is_forward:
            (self.before_forward if is_entered else self.after_forward)(path)
        elif is_entered:
            self.before_backward(path)
        elif path in self.units:  # where a unit's input needs no gradient, its backward is over with the step's
            self._complete(path)

    def before_forward(self, path: str) -> None:
        """Gather a unit that is not."""
        if path in self.units and path not in self.gathered:
            self._all_gather(path)
            self._add("free the gather before", path, self.last_gathered)
            self._copy_out(path)
            self.last_gathered = [self.buffers.pop(path)]

    def after_forward(self, path: str) -> None:
        """Free a unit's parameters; its gather's buffer stays until the next unit is gathered."""
        if path not in self.units:
            return
        if not self.units[path].stays:
            self._add("reshard", path, self.gathered.pop(path))
        self.order.append(path)

    def end_forward(self) -> None:
        """Free the last buffer of the forward."""
        self.after_forward(ROOT)
        self._add("free the last gather", ROOT, self.last_gathered)
        self.last_gathered = []

    def before_backward(self, path: str) -> None:
        """Gather a unit that is not, and the one whose backward comes next."""
        if path not in self.units:
            return
        if path not in self.gathered:
            self._all_gather(path)
            self._copy_out(path)
            self._add("free the gather", path, [self.buffers.pop(path)])
        place = self.order.index(path)
        for other in self.order[max(place - 1, 0) : place]:
            self._all_gather(other)

    def end(self) -> None:
        """Spread or keep the gradients that are left, and let go of what was summed over copies."""
        for path in [ROOT, *self.gathered]:
            if path in self.gathered:
                self._complete(path)
        if self.until_end:
            self._add("end", ROOT, self.until_end)

    def _all_gather(self, path: str) -> None:
        if path in self.buffers or path in self.gathered or path not in self.units:
            return
        unit = self.units[path]
        size_bytes = sum(p.padded(self.ranks) * p.item_bytes for p in unit.parameters)
        moved = [p for p in unit.parameters if unit.is_on_host or p.item_bytes != p.share_item_bytes]
        moved_bytes = sum(p.padded(self.ranks) // self.ranks * p.item_bytes for p in moved)
        # What is cast first, or comes from the host, is gone after the call.
        beside = [self._value("own part", path, moved_bytes, GATHERED)] if moved_bytes else []
        beside += self._gloo_copies(path, size_bytes, GATHERED)
        self.buffers[path] = self._make("all-gather", path, size_bytes, GATHERED, beside=beside)

    def _gloo_copies(self, path: str, size_bytes: int, kind: str) -> list[int]:
        """Return the copy that gloo, which communicates on a CPU, makes of what is gathered, or reduced to shares."""
        on_cpu = self.builder.context.on_cpu
        return [self._value("gloo's copy", path, size_bytes + _GLOO_NUMBER_BYTES, kind)] if on_cpu else []

    def _gathered_bytes(self, unit: Unit) -> int:
        return sum(self.builder.aligned(p.padded(self.ranks) * p.item_bytes) for p in unit.parameters)

    def _share_bytes(self, unit: Unit) -> int:
        return sum(p.padded(self.ranks) // self.ranks * p.share_item_bytes for p in unit.trainable)

    def _copy_out(self, path: str) -> None:
        size_bytes, reads = self._gathered_bytes(self.units[path]), [self.buffers[path]]
        self.gathered[path] = [self._make("parameters", path, size_bytes, GATHERED, reads=reads)]

    def _complete(self, path: str) -> None:
        """Add a unit's gradients to those of earlier backwards, free its parameters, and spread them or keep them."""
        unit = self.units[path]
        gradients = {p.name: v for p in unit.trainable if (v := self.gradient_of(p.name)) is not None}
        for parameter in unit.trainable:
            if parameter.name in self.earlier and parameter.name in gradients:
                self._add_to_earlier(path, parameter, gradients)
        self._add("reshard", path, self.gathered.pop(path))
        if unit.sends:
            self._reduce(path, list(gradients.values()))
            return
        for parameter in unit.trainable:
            if parameter.is_cast_to_be_spread and parameter.name in gradients and parameter.name not in self.earlier:
                self._whole("cast the gradient", path, unit, parameter, reads=[gradients[parameter.name]])

    def _add_to_earlier(self, path: str, parameter: Parameter, gradients: dict[str, int]) -> None:
        """Add a gradient; on a CPU one of another type is cast for that."""
        earlier, beside = self.earlier[parameter.name], list[int]()
        if parameter.is_cast_to_be_spread and self.builder.context.on_cpu:
            size_bytes = math.prod(parameter.shape) * parameter.spread_item_bytes
            beside = [self._value("cast gradient", path, size_bytes, "gradients")]
        self._add("add to the gradient before", path, [gradients[parameter.name], earlier], beside)
        gradients[parameter.name] = earlier

    def _whole(self, target: str, path: str, unit: Unit, parameter: Parameter, reads: Sequence[int] = ()) -> int:
        """Make the gradient of a parameter as it waits to be spread."""
        size_bytes = math.prod(parameter.shape) * parameter.spread_item_bytes
        return self._make(target, path, size_bytes, "gradient", reads=reads, retained=not unit.sends)

    def _reduce(self, path: str, gradients: Sequence[int]) -> None:
        unit = self.units[path]
        self._add("free the reduce-scatter before", path, self.last_reduced)
        size_bytes = sum(p.padded(self.ranks) * p.spread_item_bytes for p in unit.trainable)
        own_bytes = self._share_bytes(unit)
        buffer = self._make("gradients to be spread", path, size_bytes, "gradients", reads=gradients)
        stays = SHARES not in unit.finds and not unit.is_on_host
        share = self.builder.add_value(f"{path} share", own_bytes, kind="gradient", retained=stays)
        self.last_reduced = [buffer]
        beside = self._gloo_copies(path, size_bytes, "gradients")
        if own_bytes * self.ranks == size_bytes:
            self._add("reduce-scatter", path, [buffer], [share, *beside])
            summed = share
        else:
            spread_bytes = size_bytes // self.ranks
            summed = self._make("reduce-scatter", path, spread_bytes, "gradients", reads=[buffer], beside=beside)
            self._add("cast the share", path, [summed], [share])
        if not stays:
            self._add("add the share, or send it to the host", path, [share])
        if unit.copies:
            self.until_end.append(summed)

    def _value(self, what: str, path: str, size_bytes: int, kind: str, *, retained: bool = False) -> int:
        name = f"{what} of {path}.{len(self.builder.values)}"
        return self.builder.add_value(name, size_bytes, kind=kind, retained=retained)

    def _make(
        self,
        target: str,
        path: str,
        size_bytes: int,
        kind: str,
        *,
        reads: Sequence[int] = (),
        beside: Sequence[int] = (),
        retained: bool = False,
    ) -> int:
        """Make a value, and ``beside`` it others that are gone at once."""
        value = self._value(target, path, size_bytes, kind, retained=retained)
        self._add(target, path, reads, [value, *beside])
        return value
