"""The pool of good recompute sets: which are let in, and how two are crossed.

What runs again before one moment of the step, and how, hardly depends on what does long after it: so two are put
together, the one until some moment, the other from there on. Where that
brings nothing more for long, others are begun from nothing, and the best of both then meet.
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

_STALE, _FRUITLESS = 40, 4
"""Sets in a row that were not let in, after which all begins again; how often in a row that may have brought nothing
cheaper, until no more is to be had."""

_ONE_PLACE = 0.7
"""How often two change from one to the other only once."""


class Member(NamedTuple):
    """A recompute set within the budget: its cost in the kernels' unit, and its sorted keys."""

    cost: float
    keys: tuple[int, ...]


class SolutionPool:
    """The cheapest recompute sets found, in this generation and the earlier ones."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.members: list[Member] = []
        self.before: list[Member] = []
        """Those that these are yet to meet."""
        self.least = self.least_before = math.inf
        """Cost of the cheapest that ever was, and what that was when these began."""
        self.stale = self.fruitless = 0

    @property
    def best(self) -> Member:
        """The cheapest member."""
        return min(self.members)

    @property
    def is_exhausted(self) -> bool:
        """Whether the pool has stagnated."""
        return self.fruitless >= _FRUITLESS

    def rewrite(self, keys: Callable[[tuple[int, ...]], Iterable[int]]) -> None:
        """Rewrite the keys of all members."""
        self.members = [Member(each.cost, tuple(keys(each.keys))) for each in self.members]
        self.before = [Member(each.cost, tuple(keys(each.keys))) for each in self.before]

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

    def renewed(self, *, keep_best: bool) -> bool:
        """Restart a stagnated pool, from the best of all generations or empty; return whether it was restarted.

        Where it is hard to come by members from nothing, the best is kept even so.
        """
        if self.stale <= _STALE:
            return False
        self.fruitless = 0 if self.least < self.least_before * (1 - 1e-9) else self.fruitless + 1
        self.stale, self.least_before = 0, self.least
        if self.before:
            half = MANY // 2
            self.members, self.before = [*sorted(self.members)[:half], *sorted(self.before)[:half]], []
        else:
            self.members, self.before = sorted(self.members)[: int(keep_best)], self.members
        return True

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
