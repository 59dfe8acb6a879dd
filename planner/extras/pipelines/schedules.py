"""In which order a device of a pipeline runs its micro-batches, and how many it holds meanwhile.

A device runs *passes*: the forward or the backward of one micro-batch through one *chunk* of
layers. Schedules differ in the order alone, and what a device must hold follows from the order:

- ``gpipe``: all forwards, then all backwards. All M micro-batches are in flight
  (Huang et al., "GPipe", 2019).
- ``1f1b``: stage s of S begins with min(M, S - s - 1) forwards, then forwards and backwards take
  turns, so that min(M, S - s) are in flight (Narayanan et al., "Efficient Large-Scale Language
  Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2).
- ``interleaved``: each device has v chunks, and stage s begins with 2(S - s - 1) + (v - 1)S forwards
  of chunks, Mv at most; one more is in flight (the same paper; Korthikanti et al., "Reducing
  Activation Recomputation in Large Transformer Models", 2022, give the bytes that follow).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.common.registry import did_you_mean
from planner.errors import UsageError

SCHEDULES = ("1f1b", "gpipe", "interleaved")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """A pipeline, and in which order it runs; numbers that do not go together raise UsageError."""

    stages: int
    """Devices, each with one stage."""
    micro_batches: int
    """Micro-batches of one training step."""
    name: str = "1f1b"
    """One of :data:`SCHEDULES`."""
    chunks: int = 1
    """Groups of layers on each device; above 1 for ``"interleaved"``, and only there."""

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            hint = did_you_mean(self.name.lower(), SCHEDULES, most=1, write=str)
            raise UsageError(f"unknown schedule {self.name!r}: {hint}there are {', '.join(SCHEDULES)}")
        for what, count in (("stages", self.stages), ("micro-batches", self.micro_batches), ("chunks", self.chunks)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise UsageError(f"a pipeline needs at least 1 of its {what}, not {count!r}")
        if (self.name == "interleaved") != (self.chunks > 1):
            raise UsageError(
                f"schedule {self.name!r} does not go with {self.chunks} chunk(s) on each device: "
                "'interleaved' takes 2 or more, the others 1"
            )
        if self.name == "interleaved" and self.micro_batches % self.stages:
            raise UsageError(
                f"the interleaved schedule takes micro-batches in groups of one for each stage: "
                f"{self.micro_batches} is no multiple of {self.stages}"
            )


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


def warm_up_of(stages: int, stage: int, chunks: int = 1) -> int:
    """Return with how many forwards a device begins under 1f1b, or interleaved if it has several chunks.

    There may be fewer in a step; one more than that is in flight at most.
    """
    return stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages


def passes(schedule: PipelineSchedule, stage: int) -> tuple[Pass, ...]:
    """Return what one device runs in a training step, in order.

    >>> order = passes(PipelineSchedule(stages=2, micro_batches=3), stage=0)
    >>> " ".join(f"{'B' if done.is_backward else 'F'}{done.micro_batch}" for done in order)
    'F0 F1 B0 F2 B1 B2'
    """
    s, m, v = schedule.stages, schedule.micro_batches, schedule.chunks
    total = m * v
    warm_up = total if schedule.name == "gpipe" else min(warm_up_of(s, stage, v), total)

    def numbered(number: int, is_backward: bool) -> Pass:
        # With one chunk that is micro-batch after micro-batch; with several, groups of s go through all chunks.
        group, within = divmod(number, s * v)
        chunk, micro_batch = within // s, group * s + within % s
        if v == 1:
            chunk, micro_batch = 0, number
        return Pass(is_backward, v - 1 - chunk if is_backward else chunk, micro_batch)

    order = [numbered(number, False) for number in range(warm_up)]
    for number in range(total - warm_up):
        order += [numbered(warm_up + number, False), numbered(number, True)]
    order += [numbered(number, True) for number in range(total - warm_up, total)]
    return tuple(order)


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
    handed_bytes: int = 0
    """Its output, if another chunk of this device takes it: as the place that it has for that, until the next step."""
    output_bytes: int = 0
    """Its output, if that is the model's."""
    kept_bytes: int = 0
    """What stays until the step ends whatever the order: the loss, and the model's output if the caller wants that."""


def left_by(order: Sequence[Pass], boundaries: Sequence[Boundary], *, warm_up: int | None = None) -> list[int]:
    """Return what of finished micro-batches is held during each pass of an order, and when all are over.

    A schedule that waits for what it has sent at the end of the step holds all of that until then. One with a
    ``warm_up`` of so many forwards, which is torch's 1F1B, waits earlier: it holds the gradient that it sent last; the
    output that the warm-up sent last but one, until the forwards are over; and the model's output until the next.
    What is handed over within the device is there for every micro-batch, from this step or from the one before. From
    a forward to the end of its backward, it is the output of that.
    """
    over: list[Pass] = []
    in_flight = [0] * len(boundaries)
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
        for count, boundary in zip(in_flight, boundaries, strict=True):
            held += boundary.handed_bytes * (forwards // len(boundaries) - count)
        left.append(held)
        if done is not None:
            in_flight[done.chunk] += -1 if done.is_backward else 1
            over += [done] * done.is_backward
    return left
