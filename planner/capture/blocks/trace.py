"""Follows what eager PyTorch does around the blocks of a step: operations, storages, and when these are freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from planner.capture.storages import Run, StepRecorder, Storage


class Kind(Enum):
    """What a passage stands for."""

    FORWARD = "forward of a block"
    LOSS = "loss"
    BACKWARD = "backward of a block"


@dataclass
class Passage:
    """One way through a block, or the loss.

    Parameters
    ----------
    kind : Kind
    module : str
        Path of the block.
    reads : sequence of int or None
        Storages read; for a block, one for each given placeholder or for each tangent, None for what is resident.
    makes : dict of int to int
        Storages made; for a block from its own values to them.
    """

    kind: Kind
    module: str = ""
    reads: Sequence[int | None] = ()
    makes: dict[int, int] = field(default_factory=dict)


Event = Run | Passage


@dataclass
class Trace:
    """The step around the blocks."""

    events: list[Event]
    storages: list[Storage]


class Recorder(StepRecorder[Passage]):
    """Records a step on fake tensors, under their mode."""

    def passage(self, kind: Kind, module: str = "", reads: Sequence[int | None] = ()) -> Passage:
        """Begin a passage: what is freed from now on is freed after it."""
        passage = Passage(kind, module, reads)
        self.events.append(passage)
        return passage
