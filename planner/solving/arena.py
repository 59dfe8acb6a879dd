"""Places in one arena for blocks of memory whose lifetimes are known: static memory planning.

Blocks that are there at the same time must not overlap. The least arena is NP-hard to find (Garey and Johnson 1979,
SR2); no arena is smaller than the largest sum of what is there at one moment. Blocks are placed one after the other,
each where it fits among those that were placed before and live at the same time, in several orders: by size, as
TensorFlow Lite does (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020, greedy by
size); by how long they live, which suits training, where what is saved first is freed last; by both; by the moment at
which they meet most others (greedy by breadth there, and the contention of TelaMalloc, Maas et al., ASPLOS 2022). As
long as the best arena is above the bound, what lies on top is then placed earlier in each order, and all others again
after it (squeaky wheel optimization, Joslin and Clements 1999): first of large blocks alone, which small ones, placed
after them, hardly make higher. Integer programmes and searches prove more (OLLA and
MODeL, Steiner et al., 2022 and ICML 2023; MiniMalloc, Moffitt, ASPLOS 2023); here the bound is the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from planner.common.limits import Clock, SolveLimits
from planner.common.units import round_up

ALIGNMENT_BYTES = 64
"""To what torch aligns memory on a CPU; vector instructions want it."""

_Numbers = npt.NDArray[np.int64]
_Rule = Callable[["_Blocks"], _Numbers]

_PLACEMENT_SECONDS, _COMPARISON_SECONDS = 2e-5, 2e-9
"""What placing a block takes, and looking at one that was placed before: where work is counted, and not seconds."""

_STAGES = ((0.0, 1, 0.2), (1 / 200, 100, 0.5), (1 / 500, 100, 0.7), (0.0, 100, 1.0))
"""What share of the bound a block takes at least that is placed first, how often each order is changed, and what share
of the time is over then. Large ones that lie close leave room for small ones, and few are placed in little time."""

_FEW = 0.7
"""Large blocks are placed alone if they are no larger share of all than this: more would take as long as all do."""

COUNTED = SolveLimits(time_limit_seconds=4.0, deterministic=True)

_ENOUGH = 1e-3
"""So near to the bound, as a share of it, no smaller arena is looked for."""


@dataclass(frozen=True, slots=True)
class Block:
    """Memory that is taken at one moment, and free again after another; moments are counted from 0."""

    size_bytes: int
    born: int
    died: int
    """The last moment at which it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """One piece of memory, and where each block lies in it."""

    offsets: tuple[int, ...]
    """For each block; of one without bytes it says nothing."""
    size_bytes: int
    lower_bound_bytes: int
    """No arena is smaller: so much is there at one moment."""
    rule: str
    """The order that it came from."""

    @property
    def is_optimal(self) -> bool:
        """Whether no smaller arena is possible."""
        return self.size_bytes == self.lower_bound_bytes


def lay_out(
    blocks: Sequence[Block], *, alignment_bytes: int = ALIGNMENT_BYTES, limits: SolveLimits | None = None
) -> Arena:
    """Place blocks in an arena that is as small as is found within the limits, by default 4 s of counted work.

    Sizes are rounded up to the alignment, and offsets are its multiples. Each order takes O(blocks^2), in vectors.
    """
    clock = (limits or COUNTED).clock()
    prepared = _Blocks.of(blocks, alignment_bytes)
    wheels = {share: _Wheel(prepared.large(share)) for share, _, _ in _STAGES}
    best: _Found | None = None
    for share, rounds, until in _STAGES:
        if share and len(wheels[share].blocks.size) > _FEW * len(blocks):
            continue
        found = wheels[share].turned(rounds, clock, until)
        if share:
            found = _Found.of(prepared, found.rule, prepared.with_small(share, found.order))
            clock.work(prepared.seconds)
        if best is None or found.height < best.height:
            best = found
        if best.height <= prepared.bound * (1 + _ENOUGH) or clock.left() < 0:
            break
    assert best is not None
    return prepared.arena(best.place, best.rule)


def greedy_by_size(blocks: Sequence[Block], *, alignment_bytes: int = ALIGNMENT_BYTES) -> Arena:
    """Place blocks as TensorFlow Lite does: the largest first, each in the smallest gap that it fits."""
    prepared = _Blocks.of(blocks, alignment_bytes)
    return prepared.arena(prepared.places(_by_size(prepared), best_fit=True), "greedy by size")


def best_fit_by_time(blocks: Sequence[Block], *, alignment_bytes: int = ALIGNMENT_BYTES) -> Arena:
    """Place blocks as a simple allocator does, that knows nothing of lifetimes: when they are made, by best fit."""
    prepared = _Blocks.of(blocks, alignment_bytes)
    return prepared.arena(prepared.places(_by_birth(prepared), best_fit=True), "best fit by time")


@dataclass(frozen=True)
class _Blocks:
    """Blocks as arrays, in units of the alignment."""

    size: _Numbers
    born: _Numbers
    died: _Numbers
    alive: _Numbers
    """For each moment, the sum of what is there."""
    unit: int

    @classmethod
    def of(cls, blocks: Sequence[Block], alignment_bytes: int) -> _Blocks:
        size = np.array([round_up(block.size_bytes, alignment_bytes) // alignment_bytes for block in blocks], np.int64)
        born = np.array([block.born for block in blocks], np.int64)
        died = np.array([block.died for block in blocks], np.int64)
        return cls.at(size, born, died, alignment_bytes)

    @classmethod
    def at(cls, size: _Numbers, born: _Numbers, died: _Numbers, unit: int) -> _Blocks:
        change = np.zeros(int(died.max(initial=-1)) + 2, np.int64)
        np.add.at(change, born, size)
        np.subtract.at(change, died + 1, size)
        return cls(size, born, died, np.cumsum(change), unit)

    def large(self, share: float) -> _Blocks:
        """Return those blocks that take at least a share of the bound."""
        chosen = self.size >= share * self.bound
        return self.at(self.size[chosen], self.born[chosen], self.died[chosen], self.unit)

    def with_small(self, share: float, order: _Numbers) -> _Numbers:
        """Return an order of :meth:`large` with all others behind it, the largest first."""
        largest_first = _by_size(self)
        is_large = self.size >= share * self.bound
        return np.concatenate([np.flatnonzero(is_large)[order], largest_first[~is_large[largest_first]]])

    @property
    def bound(self) -> int:
        return int(self.alive.max(initial=0))

    @property
    def seconds(self) -> float:
        """What it takes to place all of them, where work is counted."""
        count = len(self.size)
        return count * _PLACEMENT_SECONDS + count * count * _COMPARISON_SECONDS

    def height(self, place: _Numbers) -> int:
        return int((place + self.size).max(initial=0))

    def moved_up(self, order: _Numbers, place: _Numbers) -> _Numbers:
        """Return the order with what lies on top of the arena moved halfway to its beginning."""
        top = place + self.size
        rank = np.arange(len(order), dtype=np.float64)
        highest = np.flatnonzero(top[order] == top.max())
        rank[highest] = highest / 2 - 0.5
        return order[np.argsort(rank, kind="stable")]

    def arena(self, place: _Numbers, rule: str) -> Arena:
        return Arena(
            offsets=tuple((place * self.unit).tolist()),
            size_bytes=self.height(place) * self.unit,
            lower_bound_bytes=self.bound * self.unit,
            rule=rule,
        )

    def places(self, order: _Numbers, *, best_fit: bool = False) -> _Numbers:
        """Place blocks in an order, each in the lowest gap that it fits, or in the smallest."""
        place = np.zeros(len(order), np.int64)
        low, high, born, died = (np.empty(len(order), np.int64) for _ in range(4))  # of those placed, by their place
        for count, index in enumerate(order[self.size[order] > 0]):
            size, begin, end = self.size[index], self.born[index], self.died[index]
            meets = np.flatnonzero((born[:count] <= end) & (died[:count] >= begin))
            offset = _gap(low[meets], high[meets], size, best_fit=best_fit)
            at = int(np.searchsorted(low[:count], offset, "right"))
            for array, value in ((low, offset), (high, offset + size), (born, begin), (died, end)):
                array[at + 1 : count + 1] = array[at:count]
                array[at] = value
            place[index] = offset
        return place


@dataclass(frozen=True)
class _Found:
    """Where all blocks lie that were placed in an order."""

    height: int
    rule: str
    order: _Numbers
    place: _Numbers

    @classmethod
    def of(cls, blocks: _Blocks, rule: str, order: _Numbers) -> _Found:
        _, best_fit = _RULES[rule]
        place = blocks.places(order, best_fit=best_fit)
        return cls(blocks.height(place), rule, order, place)


class _Wheel:
    """Places blocks in all orders, and changes each by what lay on top."""

    def __init__(self, blocks: _Blocks) -> None:
        self.blocks = blocks
        self.orders = {name: rule(blocks) for name, (rule, _) in _RULES.items()}
        self.best: _Found | None = None

    def turned(self, rounds: int, clock: Clock, until: float) -> _Found:
        """Return the best that is found in so many rounds more, or until a share of the time is over."""
        for name in rounds * [*self.orders]:
            found = _Found.of(self.blocks, name, self.orders[name])
            clock.work(self.blocks.seconds)
            if self.best is None or found.height < self.best.height:
                self.best = found
            if self.best.height <= self.blocks.bound * (1 + _ENOUGH) or clock.left(until) < 0:
                break
            self.orders[name] = self.blocks.moved_up(self.orders[name], found.place)
        assert self.best is not None
        return self.best


def _gap(low: _Numbers, high: _Numbers, size: int, *, best_fit: bool) -> int:
    """Return where a block fits between others, which come by their lower ends."""
    if not len(low):
        return 0
    filled = np.maximum.accumulate(high)
    width = low - np.concatenate(([0], filled[:-1]))
    fits = np.flatnonzero(width >= size)
    if not len(fits):
        return int(filled[-1])
    chosen = int(fits[np.argmin(width[fits])] if best_fit else fits[0])
    return int(filled[chosen - 1]) if chosen else 0


def _by_size(blocks: _Blocks) -> _Numbers:
    return np.lexsort((blocks.born, -blocks.size))


def _by_span(blocks: _Blocks) -> _Numbers:
    return np.lexsort((blocks.born, -blocks.size, blocks.born - blocks.died))


def _by_area(blocks: _Blocks) -> _Numbers:
    return np.lexsort((blocks.born, -blocks.size * (blocks.died - blocks.born + 1)))


def _by_birth(blocks: _Blocks) -> _Numbers:
    return np.lexsort((-blocks.died, blocks.born))


def _by_crowd(blocks: _Blocks, *, then: _Rule) -> _Numbers:
    """Order by how full the fullest moment is at which a block is there, in steps of a hundredth."""
    fullest = np.array([blocks.alive[b : d + 1].max() for b, d in zip(blocks.born, blocks.died, strict=True)], np.int64)
    later = np.empty(len(fullest), np.int64)
    later[then(blocks)] = np.arange(len(fullest))
    return np.lexsort((later, -(fullest * 100 // max(blocks.bound, 1))))


_RULES: dict[str, tuple[_Rule, bool]] = {
    "fullest moment first, then longest": (partial(_by_crowd, then=_by_span), False),
    "first made first, smallest gap": (_by_birth, True),
    "largest first, smallest gap": (_by_size, True),
    "longest first": (_by_span, False),
    "largest first": (_by_size, False),
    "largest times longest first": (_by_area, False),
    "fullest moment first, then largest": (partial(_by_crowd, then=_by_size), False),
    "first made first": (_by_birth, False),
}
"""By name, an order, and whether blocks go into the smallest gap that they fit, and not the lowest."""
