"""How one budget is divided over graphs that hold memory at the same time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from planner.ir.schedule import Schedule
from planner.plans.budget_split import Call, Needs, calls_in, fraction_that_fits, least_bytes, needs_of
from tests.example_graphs import transformer


def needs(kept: int, forward: int, backward: int) -> Needs:
    return Needs(kept_bytes=kept, forward_bytes=forward, backward_bytes=backward)


def call(lowest: Needs, whole: Needs, after: Iterable[Call] = (), own: int = 0, left: int = 0) -> Call:
    following = dict(enumerate(after))
    return Call(lowest=lowest, whole=whole, own_bytes=own, left_bytes=left, after=following)


def test_what_a_graph_keeps_is_there_between_its_forward_and_its_backward() -> None:
    graph, costs = transformer(2)
    found = needs_of(graph, costs, Schedule.keep_all(graph))
    assert 0 < found.kept_bytes <= found.peak_bytes
    assert found.followed_by(0, 0) == found.peak_bytes
    assert found.followed_by(1000, 0) == max(found.peak_bytes, found.kept_bytes + 1000)
    assert found.followed_by(0, 10**6) == 10**6 + max(found.kept_bytes, found.backward_bytes)


def test_one_graph_may_hold_all_that_is_free() -> None:
    alone = [call(needs(10, 20, 30), needs(80, 90, 130))]
    assert least_bytes(alone) == 30
    assert fraction_that_fits(alone, 130) == 1.0
    assert fraction_that_fits(alone, 80) == 0.5
    assert fraction_that_fits(alone, 30) == 0.0


@pytest.mark.parametrize("free_bytes", range(100, 420, 40))
def test_the_same_fraction_fits_at_every_peak(free_bytes: int) -> None:
    last = call(needs(5, 20, 25), needs(60, 60, 90), own=7, left=3)
    other = call(needs(5, 40, 45), needs(30, 50, 60))
    first = call(needs(10, 20, 30), needs(80, 90, 130), [last, other], own=4, left=11)
    fraction = fraction_that_fits([first], free_bytes)

    def held(share: float) -> int:
        """Return the most that is held at any call's own peak."""
        before = first.kept_bytes(share)
        between = [int(low + share * (high - low)) + own for low, high, own in ((25, 90, 7), (45, 60, 0))]
        return max(4 + int(40 + share * 100), *(before + each for each in between))  # 10 bytes are left behind

    assert least_bytes([first]) == held(0.0)
    assert held(fraction) <= max(free_bytes, held(0.0))
    assert fraction == 1.0 or held(min(1.0, fraction + 0.05)) > free_bytes
    assert [one is first for one in calls_in([first])] == [True, False, False]
