"""The pool of good recompute sets: which are let in, and how two are crossed.

What runs again before one moment of the step, and how, hardly depends on what does long after it: so two are put
together, the one until some moment, the other from there on.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple

MANY = 12
"""Members at most."""

_ALIKE = 0.03
"""Two are alike that differ in no more than this share of what runs again, and only the cheaper stays."""

_STALE, _EXHAUSTED = 40, 200
"""Sets in a row that were not let in, from which on some begin from nothing again, and until no more is to be had."""

_ONE_PLACE = 0.7
"""How often two change from one to the other only once."""


class Member(NamedTuple):
    """A recompute set within the budget: its cost in the kernels' unit, and its sorted keys."""

    cost: float
    keys: tuple[int, ...]


class SolutionPool:
    """The cheapest recompute sets found."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.members: list[Member] = []
        self.least = math.inf
        """Cost of the cheapest that ever was."""
        self.stale = 0
        """How many sets in a row were not let in."""

    @property
    def best(self) -> Member:
        """The cheapest member."""
        return min(self.members)

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing was let in for so long that no more is to be had."""
        return self.stale >= _EXHAUSTED

    @property
    def is_stale(self) -> bool:
        """Whether nothing was let in for long."""
        return self.stale >= _STALE

    def rewrite(self, keys: Callable[[tuple[int, ...]], Iterable[int]]) -> None:
        """Rewrite the keys of all members."""
        self.members = [Member(each.cost, tuple(keys(each.keys))) for each in self.members]

    def enter(self, found: Member | None) -> None:
        """Add a member that is cheaper than similar ones, or than the dearest if the pool is full.

        None stands for one that does not keep the budget. O(members x keys).
        """
        self.stale += 1
        if found is None:
            return
        self.least = min(self.least, found.cost)
        less = [member for member in self.members if _are_alike(found, member)]
        if not less and len(self.members) >= MANY:
            less = [max(self.members)]
        if all(found.cost < member.cost * (1 - 1e-9) for member in less):
            self.members = [found, *(member for member in self.members if member not in less)]
            self.stale = 0

    def crossed(self) -> list[int]:
        """Cross two recompute sets at one slot, or between two."""
        one, other = self.random.sample(self.members, 2)
        places = sorted({*one.keys, *other.keys})
        first, last = sorted(self.random.choices(places, k=2))
        if self.random.random() < _ONE_PLACE:
            last = places[-1] + 1
        start, end = bisect_left(one.keys, first), bisect_left(one.keys, last)
        inner = other.keys[bisect_left(other.keys, first) : bisect_left(other.keys, last)]
        return [*one.keys[:start], *inner, *one.keys[end:]]


def _are_alike(one: Member, other: Member) -> bool:
    different = len(set(one.keys).symmetric_difference(other.keys))
    return math.isclose(one.cost, other.cost) or different <= _ALIKE * min(len(one.keys), len(other.keys))
