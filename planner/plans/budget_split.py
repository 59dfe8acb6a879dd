"""One budget for several graphs that hold memory at the same time.

A program that is compiled in pieces runs one graph after the other, and differentiates them in the opposite order:
what the first keeps for its backward is there while all others run. What runs after a graph is to it what a loss
outside is to a whole model, so each can be planned by itself, once it is known how much the others take.

Every graph gets the same fraction of the way from the least that it can hold to what it holds without recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.host import UNTIMED
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one graph holds, above what is resident, in bytes."""

    kept_bytes: int
    """Between its forward and its backward, what it returned and the gradients of that included."""
    forward_bytes: int
    """At most until its forward has ended."""
    backward_bytes: int
    """At most from where its backward begins."""

    @property
    def peak_bytes(self) -> int:
        """At most."""
        return max(self.kept_bytes, self.forward_bytes, self.backward_bytes)

    def followed_by(self, working_bytes: int, left_bytes: int) -> int:
        """Return the most bytes where others take so much in between, and leave so much behind."""
        between_bytes = self.kept_bytes + left_bytes + working_bytes
        return max(self.forward_bytes, between_bytes, self.backward_bytes + left_bytes)


def needs_of(graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule) -> Needs:
    """Return what a graph holds under a schedule."""
    timeline = simulate(graph, costs, schedule, UNTIMED).timeline_bytes
    phases = [graph.operations[index].phase for index in schedule.order]
    between = phases.index(Phase.LOSS)
    return Needs(
        kept_bytes=timeline[between],
        forward_bytes=max(timeline[:between], default=0),
        backward_bytes=max(timeline[between + 1 :], default=0),
    )


@dataclass(eq=False, kw_only=True)
class Call:
    """A call of a graph, at its place in the order of the calls whose memory is held at the same time."""

    lowest: Needs
    """Under the lowest plan that is known."""
    whole: Needs
    """Without recompute."""
    own_bytes: int
    """What it is given that no earlier call holds."""
    left_bytes: int
    """Gradients and outputs, which are there when its backward has ended."""
    after: dict[Any, Call] = field(default_factory=dict)
    """The calls that came next."""

    @property
    def left_after_bytes(self) -> int:
        """Bytes that all later calls leave live."""
        return max((c.own_bytes + c.left_bytes + c.left_after_bytes for c in self.after.values()), default=0)

    def kept_bytes(self, fraction: float) -> int:
        """Return what it may keep for its backward, with what it is given."""
        return self.own_bytes + int(_between(fraction, self.lowest.kept_bytes, self.whole.kept_bytes))


def least_bytes(first: Iterable[Call]) -> int:
    """Return the peak bytes if every call holds the least that is known."""
    return max((held(0.0) for held in _moments(first)), default=0)


def fraction_that_fits(first: Iterable[Call], free_bytes: int) -> float:
    """Return the largest fraction, from 0 to 1, that keeps so many bytes at all times."""
    fraction = 1.0
    for held in _moments(first):
        least, most = held(0.0), held(1.0)
        if most > free_bytes:
            fraction = min(fraction, max(0.0, (free_bytes - least) / max(1, most - least)))
    return fraction


def calls_in(first: Iterable[Call]) -> Iterator[Call]:
    """Return all calls, each before those that come after it."""
    for call in first:
        yield call
        yield from calls_in(call.after.values())


def _moments(calls: Iterable[Call], before: tuple[Call, ...] = ()) -> Iterator[Callable[[float], int]]:
    """Return what is held at every call's own peak, as a function of the fraction: a straight line."""
    for call in calls:

        def held(fraction: float, call: Call = call) -> int:
            low, high = (needs.followed_by(0, call.left_after_bytes) for needs in (call.lowest, call.whole))
            own_bytes = call.own_bytes + int(_between(fraction, low, high))
            return sum(earlier.kept_bytes(fraction) for earlier in before) + own_bytes

        yield held
        yield from _moments(call.after.values(), (*before, call))


def _between(fraction: float, low: int, high: int) -> float:
    return low + fraction * max(0, high - low)
