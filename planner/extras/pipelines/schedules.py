"""In which order a device of a pipeline runs its micro-batches, and how many it holds meanwhile.

A device runs *passes*: the forward or the backward of one micro-batch through one *chunk* of
layers. Schedules differ in the order alone, and what a device must hold follows from the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch through one chunk, forward or backward."""

    is_backward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Load:
    """What a device holds beside the pass that is under way.

    For each chunk, how many other micro-batches wait for their backward, and whether an earlier backward has left
    gradients; and what of finished micro-batches is not let go yet.
    """

    chunk: int
    is_backward: bool
    others: tuple[int, ...]
    accumulated: tuple[bool, ...]
    left_bytes: int


def passes(micro_batches: int, warm_up: int) -> tuple[Pass, ...]:
    """Return what a device with one chunk runs in a training step that begins with so many forwards, in order.

    >>> " ".join(f"{'B' if done.is_backward else 'F'}{done.micro_batch}" for done in passes(3, warm_up=1))
    'F0 F1 B0 F2 B1 B2'
    """
    order = [Pass(False, 0, number) for number in range(warm_up)]
    for number in range(micro_batches - warm_up):
        order += [Pass(False, 0, warm_up + number), Pass(True, 0, number)]
    return (*order, *(Pass(True, 0, number) for number in range(micro_batches - warm_up, micro_batches)))


def loads(order: Sequence[Pass], chunks: int, left_bytes: Sequence[int] = ()) -> tuple[Load, ...]:
    """Return the different loads under which a device runs its passes, in order of their first time.

    ``left_bytes`` are, for each pass, what of finished micro-batches the device still holds; see :func:`left_by`.
    """
    waiting, accumulated = [0] * chunks, [False] * chunks
    seen: dict[Load, None] = {}
    for done, left in zip(order, left_bytes or [0] * len(order), strict=True):
        waiting[done.chunk] -= done.is_backward
        seen[Load(done.chunk, done.is_backward, tuple(waiting), tuple(accumulated), left)] = None
        waiting[done.chunk] += not done.is_backward
        accumulated[done.chunk] |= done.is_backward
    return tuple(seen)


def most_in_flight(loads: Sequence[Load]) -> int:
    """Return how many micro-batches a device holds at most, the one under way included, counted in chunks."""
    return max(sum(load.others) for load in loads) + 1


# What torch.distributed.pipelining holds of micro-batches whose backward is over.


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What of one micro-batch outlives its backward through a chunk."""

    sent_bytes: int = 0
    """Its output, if that goes to another device."""
    returned_bytes: int = 0
    """The gradient of its input, if that goes to another device."""
    output_bytes: int = 0
    """Its output, if that is the model's."""
    kept_bytes: int = 0
    """What stays until the step ends whatever the order: the loss, and the model's output if the caller wants that."""


def left_by(order: Sequence[Pass], boundaries: Sequence[Boundary], *, warm_up: int | None = None) -> list[int]:
    """Return what of finished micro-batches is held during each pass of an order, and when all are over.

    A schedule that waits for what it has sent at the end of the step holds all of that until then. One with a
    ``warm_up`` of so many forwards, which is torch's 1F1B, waits earlier: it holds the gradient that it sent last; the
    output that the warm-up sent last but one, until the forwards are over; and the model's output until the next.
    """
    over: list[Pass] = []
    left = []
    forwards = sum(not done.is_backward for done in order)
    for done in (*order, None):
        held = sum(boundaries[one.chunk].kept_bytes for one in over)
        if warm_up is None:
            held += sum(boundaries[one.chunk].sent_bytes + boundaries[one.chunk].returned_bytes for one in over)
        elif over and done is not None:
            (boundary,) = boundaries
            is_steady = not done.is_backward or done.micro_batch <= forwards - warm_up
            held += boundary.returned_bytes
            held += boundary.sent_bytes * (is_steady and 0 <= warm_up - 2 < len(over))
            held += boundary.output_bytes * (not done.is_backward)
        left.append(held)
        if done is not None and done.is_backward:
            over.append(done)
    return left
