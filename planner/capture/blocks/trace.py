"""Follows what eager PyTorch does around the blocks of a step: operations, storages, and when these are freed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_stack
from typing import Any

from torch import nn

from planner.capture.autograd_accumulation import EngineSums
from planner.capture.storages import Run, StepRecorder
from planner.capture.torch_internals import CHECKPOINT, next_number, number_at_work
from planner.ir.graph import Phase


@dataclass
class Passage:
    """The forward of a block, its backward, or the loss.

    ``reads`` are storages; for a block, one for each given placeholder or for each tangent, None for what is resident.
    ``makes`` are too; for a block from its own values to them.
    """

    phase: Phase
    module: str = ""
    reads: Sequence[int | None] = ()
    makes: dict[int, int] = field(default_factory=dict)


@dataclass
class Turn:
    """The moment at which the forward or backward of a unit of FSDP2 that is no block begins, or ends."""

    unit: str
    is_entered: bool


class Recorder(StepRecorder[Passage | Turn]):
    """Records a step on fake tensors, under their mode."""

    def __init__(self, fakes: Any, sums: EngineSums, resident: Any, names: dict[nn.Module, str]) -> None:
        super().__init__(fakes, sums, resident, names)
        self.checkpoints = False
        """Whether something ran under ``torch.utils.checkpoint``."""
        self.found: list[int] = []
        """Storages of gradients that earlier backwards have left."""
        self.gradients: dict[str, int] = {}
        """The storage of each parameter's gradient at the end, by the parameter's name."""
        self._turns: list[int] = []
        self._at_work: list[str] = []
        """From the operation of each number on, in forward order, the module that is at work."""

    def passage(self, phase: Phase, module: str = "", reads: Sequence[int | None] = ()) -> Passage:
        """Begin a passage: what is freed from now on is freed after it."""
        self.checkpoints |= _is_checkpointed()
        passage = Passage(phase, module, reads)
        self.events.append(passage)
        return passage

    def note(self, function: Any, args: Any, kwargs: Any, result: Any) -> Run | None:
        """Write a call down, and what it is a part of the derivative of."""
        run = super().note(function, args, kwargs, result)
        self.checkpoints |= _is_checkpointed()
        if run is not None and (number := number_at_work()) is not None:
            turn = bisect_right(self._turns, number)
            run.derivative_of = self._at_work[turn - 1] if turn else ""
        return run

    def turn(self, unit: str, *, is_entered: bool) -> None:
        """Note a turn of a unit."""
        self.events.append(Turn(unit, is_entered))

    def entered(self, module: nn.Module, inputs: Any) -> None:
        """Note that a module's forward begins."""
        super().entered(module, inputs)
        self._turn()

    def left(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Note that a module's forward ends."""
        super().left(module, inputs, outputs)
        self._turn()

    @contextmanager
    def caller(self) -> Iterator[None]:
        """Count the derivative of what runs to the module that calls the one at work."""
        *outside, inside = self.within
        self.within = outside
        self._turn()
        try:
            yield
        finally:
            self.within.append(inside)
            self._turn()

    def _turn(self) -> None:
        self._turns.append(next_number())
        self._at_work.append(self.module)


def _is_checkpointed() -> bool:
    return any(frame.f_code is CHECKPOINT for frame, _ in walk_stack(None))
