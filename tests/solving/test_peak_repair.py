"""Mending: a lower peak by making again what waits over the highest moment."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.common.limits import SolveLimits
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.solving import minimum_peak_search, peak_repair
from planner.solving.minimum_peak_search import lowest_plan
from planner.solving.peak_bounds import lowest_schedule, proven_peak
from planner.solving.peak_repair import with_lower_peak
from planner.solving.recompute_search import RecomputeSearch
from tests.example_graphs import Builder
from tests.oracle import lowest, random_graph, resnet_like
from tests.planned import problem_at
from tests.solving.test_peak_bounds import residual_layers
from tests.tiers import tiered

LIMITS = SolveLimits(time_limit_seconds=1.0, deterministic=True)


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_a_mended_plan_is_no_higher_and_no_lower_than_can_be(seed: int) -> None:
    problem = problem_at(random_graph(seed, operations=8, plain=seed % 2 == 0), 0)
    start = Schedule.keep_all(problem.graph)
    found = problem.evaluate(with_lower_peak(problem, start, LIMITS.clock(), 0)).peak_bytes
    assert lowest(problem.graph, problem.costs) <= found <= problem.baseline.peak_bytes


@pytest.mark.skipif(find_spec("numba") is None, reason="annealing needs numba")
def test_what_annealing_leaves_is_made_again_by_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many reruns at once, none of which helps alone: moves at random do not come by them."""
    problem = problem_at(resnet_like(10), 0)
    start = lowest_schedule(problem)
    least_bytes = proven_peak(problem.graph, problem.costs)[0]
    assert problem.evaluate(lowest_plan(problem, start, LIMITS)).peak_bytes <= 1.0001 * least_bytes
    monkeypatch.setattr(minimum_peak_search, "with_lower_peak", lambda problem, schedule, *_: schedule)
    assert problem.evaluate(lowest_plan(problem, start, LIMITS)).peak_bytes > 1.05 * least_bytes


@pytest.mark.skipif(find_spec("numba") is None, reason="annealing needs numba")
@pytest.mark.parametrize(("blocks", "levels", "seconds"), tiered([(8, 1, 1.0), (16, 2, 3.0)], slow=[(16, 2, 3.0)]))
def test_what_is_found_by_looking_harder(
    blocks: int, levels: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, costs = resnet_like(blocks)
    problem = Problem(graph=graph, costs=costs, budget_bytes=proven_peak(graph, costs)[0])
    start = lowest_schedule(problem)
    limits = SolveLimits(time_limit_seconds=seconds, deterministic=True)
    assert problem.evaluate(lowest_plan(problem, start, limits)).peak_bytes == problem.budget_bytes
    monkeypatch.setattr(peak_repair, "_LEVELS", peak_repair._LEVELS[:levels])
    assert problem.evaluate(lowest_plan(problem, start, limits)).peak_bytes > 1.05 * problem.budget_bytes


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_it_stops_at_what_is_asked(share: float) -> None:
    problem = problem_at(residual_layers(count=6), 0)
    least_bytes = proven_peak(problem.graph, problem.costs)[0]
    asked_bytes = int(least_bytes + share * (problem.baseline.peak_bytes - least_bytes))
    start = Schedule.keep_all(problem.graph)
    found = problem.evaluate(with_lower_peak(problem, start, LIMITS.clock(), asked_bytes)).peak_bytes
    assert 0.9 * asked_bytes <= found <= asked_bytes


def test_it_is_the_same_every_time() -> None:
    problem = problem_at(residual_layers(count=8), 0)
    limits = SolveLimits(time_limit_seconds=0.05, deterministic=True)
    found = [with_lower_peak(problem, Schedule.keep_all(problem.graph), limits.clock(), 0) for _ in range(2)]
    assert found[0] == found[1]


def test_what_can_be_made_later_makes_room_meanwhile() -> None:
    """Beside what is held there is no room for the large one: it goes, and is made of nothing again."""
    builder = Builder()
    (easy,) = builder.add("easy", [], [128])
    (large,) = builder.add("large", [], [256])
    (value,) = builder.add("value", [large], [64])
    search = RecomputeSearch(builder.graph("room", {}), tuple(builder.costs))
    assert search.runs(value, 1 << easy, 3, 256 + 64 + 128) == [1, 2]
    assert search.runs(value, 1 << easy, 3, 256 + 64) == [1, 2, 0]
    assert search.runs(value, 1 << easy, 3, 256 + 64 - 1) is None
