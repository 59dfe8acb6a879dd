"""Populations of sets of reruns: who is let in, and what is made of two."""

from __future__ import annotations

from itertools import groupby
from random import Random

from planner.solvers import search
from planner.solvers.search import Member, SolutionPool


def of(*members: Member) -> SolutionPool:
    found = SolutionPool(Random(0))
    for member in members:
        found.enter(member)
    return found


def costs(members: list[Member]) -> list[float]:
    return sorted(member.cost for member in members)


def test_of_many_the_cheapest_stay_and_of_equal_ones_the_first() -> None:
    there = of(*(Member(float(cost), (int(cost),)) for cost in (5.0, *range(40, 20, -1), 5.0)))
    assert costs(there.members) == [5.0, *map(float, range(21, 32))]
    assert there.best.cost == there.least == 5.0


def test_of_those_that_are_alike_the_cheapest_stays() -> None:
    keys = tuple(range(100))
    there = of(Member(3.0, keys), Member(9.0, (500,)), Member(4.0, (*keys, 100)))
    assert costs(there.members) == [3.0, 9.0]
    there.enter(Member(2.0, (*keys, 101)))
    assert costs(there.members) == [2.0, 9.0]
    there.enter(Member(2.5, keys[:50]))
    assert costs(there.members) == [2.0, 2.5, 9.0]


def test_it_is_stale_and_then_exhausted_where_nothing_is_let_in_for_long() -> None:
    there = of(Member(3.0, (3,)))
    for _ in range(search._EXHAUSTED):
        assert not there.is_exhausted
        there.enter(None)
    assert there.is_stale and there.is_exhausted
    there.enter(Member(2.0, (2,)))
    assert not there.is_stale


def test_two_are_crossed_at_moments_of_the_step() -> None:
    parts = tuple(range(0, 100, 2)), tuple(range(1, 100, 2))
    there = of(*(Member(float(cost), keys) for cost, keys in enumerate(parts)))
    seen = set()
    for _ in range(200):
        found = there.crossed()
        assert found == sorted(found)
        owners = [list(those) for _, those in groupby(found, key=lambda key: key % 2)]
        assert len(owners) <= 3
        for those in owners:
            assert those == [key for key in parts[those[0] % 2] if those[0] <= key <= those[-1]]
        seen.add(tuple(those[0] % 2 for those in owners))
    assert seen >= {(0, 1), (1, 0), (0, 1, 0), (1, 0, 1)}
