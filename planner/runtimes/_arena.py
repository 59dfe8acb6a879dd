"""Fixed places for what the steps of one wrapped model allocate on a CPU.

A first call is planned, and captured where the runtime does so; the second of the same kind is recorded; from the third
on each allocation of the step lies where :func:`planner.solving.arena.lay_out` puts it. A step is from the beginning of
the forward to the end of the backward, the loss between them. What is still there when the next step begins (outputs
and gradients that somebody keeps, caches) is left outside of the arena, and so is whatever does not go as recorded: see
``planner/capture/arena.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from planner.capture import arena_internals
from planner.capture.arena_internals import BACKWARD, BETWEEN, FORWARD, Memory, Table
from planner.capture.device import of_model
from planner.capture.inputs import differentiable_in
from planner.capture.torch_internals import at_end_of_backward
from planner.common.units import format_bytes
from planner.errors import RuntimeUnsupportedError
from planner.solving.arena import Block, lay_out

_MOST_RECORDINGS = 4
"""A step that does not go as it was recorded is recorded again, so many times in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaInUse:
    """What an arena holds of the last kind of step; sizes are rounded up for alignment."""

    size_bytes: int
    """Of the arena, which all kinds of steps share."""
    peak_bytes: int
    """The most that is in it at one moment: no arena can be smaller."""
    outside_bytes: int
    """The most that is outside at one moment, because somebody keeps it beyond the step."""
    places: int
    """Allocations of a step that have a place."""
    astray: int = 0
    """How many were elsewhere in the last step that is over, because it did not go as recorded."""

    def __str__(self) -> str:
        """Say what it takes in one line."""
        share = self.size_bytes / self.peak_bytes if self.peak_bytes else 1.0
        kept = f", {format_bytes(self.outside_bytes)} outside" if self.outside_bytes else ""
        astray = f"; {self.astray} elsewhere in the last step" if self.astray else ""
        return f"{format_bytes(self.size_bytes)} for {self.places} tensors, {share:.3f} of their peak{kept}{astray}"


class _Kind:
    """Steps that allocate alike, as far as that is known before they run."""

    def __init__(self) -> None:
        self.calls = self.recordings = 0
        self.table: Table | None = None
        """With places, once there are some."""
        self.recorded: tuple[Table, list[int]] | None = None
        """What it was made from: for other memory."""
        self.in_use: ArenaInUse | None = None


@dataclass(slots=True)
class _Call:
    """A call whose step is under way, or over."""

    kind: _Kind
    table: Table
    has_begun: bool = False
    has_ended: bool = False

    def begin_backward(self) -> None:
        """Go on where the backward comes to the first of the outputs; a second backward has no places."""
        if not self.has_begun:
            self.has_begun = True
            self.table.enter(BACKWARD)

    def end_backward(self) -> None:
        arena_internals.leave()
        self.has_ended = True


class Arenas:
    """One arena, and the tables of all kinds of steps that lie in it."""

    def __init__(self, model: nn.Module) -> None:
        device = of_model(model)
        if device.type != "cpu":
            raise RuntimeUnsupportedError(
                f"arena=True places tensors on a CPU, and the model is on {device.type}: leave arena out to train, and "
                "let planner.plan(..., arena=True) say what an arena would take there beside what CUDA reserves"
            )
        if lacking := arena_internals.missing():
            raise RuntimeUnsupportedError(f"arena=True needs {lacking}, and there is none: leave arena out")
        arena_internals.leave()  # which compiles it, unless it was before
        self.in_use: ArenaInUse | None = None
        self._kinds: dict[Any, _Kind] = {}
        self._memory: Memory | None = None
        self._last: _Call | None = None

    @contextmanager
    def forward(self, situation: Any) -> Iterator[Callable[[Any], None]]:
        """Give what the forward allocates its places; call what this gives with the outputs."""
        self._take_down()
        kind = self._kinds.setdefault(situation, _Kind())
        kind.calls += 1
        if kind.calls == 1:
            yield _nothing
            return
        self._last = call = _Call(kind, kind.table or Table())
        call.table.enter(FORWARD)
        try:
            yield lambda outputs: self._wait(call, outputs)
        except BaseException:
            arena_internals.leave()
            raise
        call.table.enter(BETWEEN)

    def stop(self) -> None:
        """Let this thread's allocations be nobody's."""
        arena_internals.leave()

    @staticmethod
    def _wait(call: _Call, outputs: Any) -> None:
        at_end_of_backward(differentiable_in(outputs), call.end_backward, begun=call.begin_backward)

    def _take_down(self) -> None:
        """Learn from the last step, which is over: the next one begins."""
        arena_internals.leave()
        call, self._last = self._last, None
        if call is None or not call.has_ended:
            return
        kind = call.kind
        if kind.table is None:
            self._lay_out(kind, call.table)
        else:
            _, missed = kind.table.counts()
            self.in_use = replace(kind.in_use, astray=missed) if kind.in_use is not None else None
            if missed and kind.recordings < _MOST_RECORDINGS:
                kind.table = None

    def _lay_out(self, kind: _Kind, recorded: Table) -> None:
        """Place what a step allocated and gave back."""
        kind.recordings += 1
        made = recorded.recorded()
        places = [number for number, (_, freed) in enumerate(made) if freed >= 0]
        found = lay_out([Block(made[number][0], number, made[number][1] - 1) for number in places])
        offsets = [-1] * len(made)
        for number, offset in zip(places, found.offsets, strict=True):
            offsets[number] = offset
        if self._memory is None or self._memory.size_bytes < found.size_bytes:
            self._memory = Memory(max(found.size_bytes, 1))
            for other in self._kinds.values():  # smaller steps lie in the same memory
                if other.table is not None and other.recorded is not None:
                    other.table = other.recorded[0].placed(other.recorded[1], self._memory)
        kind.recorded = recorded, offsets
        kind.table = recorded.placed(offsets, self._memory)
        kind.in_use = self.in_use = ArenaInUse(
            size_bytes=self._memory.size_bytes,
            peak_bytes=found.lower_bound_bytes,
            outside_bytes=sum(size for size, freed in made if freed < 0),
            places=len(places),
        )


def _nothing(_outputs: Any) -> None:
    """Do nothing: the first call of a kind."""
