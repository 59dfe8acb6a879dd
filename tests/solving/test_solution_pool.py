"""Populations of sets of reruns: who is let in, when all begins again, and what is made of two."""

from __future__ import annotations

from itertools import groupby
from random import Random

from planner.solving import solution_pool
from planner.solving.solution_pool import MANY, Member, SolutionPool


def of(*members: Member) -> SolutionPool:
    found = SolutionPool(Random(0))
    for member in members:
        found.enter(member)
    return found


def costs(members: list[Member]) -> list[float]:
    return sorted(member.cost for member in members)


def stale(there: SolutionPool, *, keep_best: bool = False) -> bool:
    """Offer what is not let in until it is time to begin again."""
    for _ in range(solution_pool._STALE + 1):
        there.enter(None)
    return there.renewed(keep_best=keep_best)


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


def test_where_nothing_more_is_let_in_others_begin_and_the_best_of_both_then_meet() -> None:
    there = of(*(Member(float(cost), (cost,)) for cost in range(10, 20)))
    assert not there.renewed(keep_best=False)
    assert stale(there)
    assert there.members == []
    for cost in range(5, 15):
        there.enter(Member(float(cost), (100 + cost,)))
    assert stale(there)
    assert costs(there.members) == [5, 6, 7, 8, 9, 10, 10, 11, 12, 13, 14, 15]
    assert len(there.members) == MANY


def test_the_best_stays_where_it_is_hard_to_come_by_others() -> None:
    there = of(Member(3.0, (3,)), Member(2.0, (2,)))
    assert stale(there, keep_best=True)
    assert costs(there.members) == [2.0]


def test_it_is_exhausted_when_it_brought_nothing_cheaper_some_times() -> None:
    there = of(Member(3.0, (3,)))
    assert stale(there)
    for times in range(1, solution_pool._FRUITLESS + 1):
        assert not there.is_exhausted
        assert stale(there)
        assert there.fruitless == times
    assert there.is_exhausted
    there.enter(Member(2.0, (2,)))
    assert stale(there)
    assert not there.is_exhausted


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
