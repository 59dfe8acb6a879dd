"""What annealing promises: bytes exact after every move, near the optimum, never over the budget."""

from __future__ import annotations

import fcntl
import importlib.util
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import solvers
from planner.common.limits import SolveLimits
from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.ir.graph import OperationCost
from planner.ir.problem import Problem, Solution, confirm
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.solvers import search
from planner.solvers.search import SOLVER, Member
from planner.solving.incumbent import Incumbent
from planner.solving.peak_bounds import first_run_bytes
from planner.solving.rerun_set import SLOTS, RerunSet, slots_needed
from tests import oracle
from tests.example_graphs import by_reads, transformer
from tests.planned import problem_at
from tests.tiers import tiered

HAS_NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")


def reruns(annealing: RerunSet) -> list[int]:
    return [int(key) for key in annealing.state.reruns[: annealing.state.whole[annealing.kernels.RERUNS]]]


def assert_agrees_with_the_simulator(annealing: RerunSet) -> None:
    state, kernels, problem = annealing.state, annealing.kernels, annealing.problem
    schedule = annealing.schedule(reruns(annealing))
    evaluation = simulate(problem.graph, problem.costs, schedule)
    runs = int(state.whole[kernels.RUNS])
    assert tuple(int(key) % len(problem.costs) for key in state.keys[:runs]) == schedule.order
    assert tuple(state.live_bytes[:runs].tolist()) == evaluation.timeline_bytes
    assert state.real[kernels.COST] * annealing.unit_seconds == pytest.approx(evaluation.recompute_seconds, abs=1e-12)
    over = [max(live - problem.budget_bytes, 0) for live in evaluation.timeline_bytes]
    assert state.whole[kernels.EXCESS] == sum(over)


def improved(
    problem: Problem, known: Schedule | None = None, *, seconds: float = 5.0, bound: float = 0.0, **options: Any
) -> Solution:
    incumbent = Incumbent(problem)
    if known is not None:
        assert incumbent.update(known, "known")
    incumbent.raise_bound(bound)
    SOLVER.improve(incumbent, effort=SolveLimits(time_limit_seconds=seconds), **options)
    solution = incumbent.solution()
    confirm(problem, solution)
    return solution


# ----------------------------------------------------------------------------- the kernels


@pytest.fixture(params=["compiled", "plain"])
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """Run the kernels compiled where numba is there, and a little also as plain Python."""
    if request.param == "compiled":
        if not HAS_NUMBA:
            pytest.skip("numba is not installed")
        return lambda count: count
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "planner.solving.annealing", raising=False)
    pytest.importorskip("numpy")
    import planner.solving as package

    monkeypatch.delattr(package, "annealing", raising=False)
    return lambda count: max(count // 8, 1)


def test_bytes_and_seconds_are_exact_after_every_move(pace: Callable[[int], int]) -> None:
    for seed in range(pace(80)):
        rng = random.Random(seed)
        annealing = RerunSet(problem_at(oracle.random_graph(seed, operations=rng.choice([4, 7, 9, 14])), 0.75), seed)
        assert_agrees_with_the_simulator(annealing)
        for number in range(40):
            temperature = 5.0 if number % 2 else 0.1
            annealing.kernels.anneal(annealing.tables, annealing.state, rng.choice([1, 2, 5]), temperature, 1e-3)
            assert_agrees_with_the_simulator(annealing)


def test_any_set_of_reruns_can_be_loaded(pace: Callable[[int], int]) -> None:
    for seed in range(pace(60)):
        rng = random.Random(seed)
        problem = problem_at(oracle.random_graph(seed, operations=10), 0.7)
        annealing = RerunSet(problem, seed)
        free = [o for o, operation in enumerate(problem.graph.operations) if operation.recomputable and o < 9]
        slots = int(annealing.state.whole[annealing.kernels.SLOTS])
        keys = [10 * rng.randrange(slots * (o + 1), slots * 10) + o for o in rng.choices(free, k=12)] if free else []
        annealing.reset(keys)
        assert sorted(reruns(annealing)) == sorted(set(keys))
        assert_agrees_with_the_simulator(annealing)


def test_what_runs_again_before_one_operation_need_not_go_in_base_order(pace: Callable[[int], int]) -> None:
    """A large value that is needed for a small one alone is made, and gone, before another one is made."""
    reads = [(), (), (1,), (), (), (0, 2)]
    sizes = [4, 8, 1, 12, 12, 1]
    costs = (OperationCost(seconds=1.0),) * len(reads)
    problem = Problem(graph=by_reads(reads, sizes), costs=costs, budget_bytes=12)
    schedule = Schedule((0, 1, 2, 3, 4, 1, 2, 0, 5))
    assert problem.evaluate(schedule).peak_bytes == 12
    assert problem.evaluate(Schedule((0, 1, 2, 3, 4, 0, 1, 2, 5))).peak_bytes == 13
    annealing = RerunSet(problem, 0)
    annealing.reset(annealing.keys_of(schedule))
    assert_agrees_with_the_simulator(annealing)
    assert annealing.schedule(reruns(annealing)) == schedule
    if pace(8) == 8:
        found = solvers.solve(problem, "search", time_limit_seconds=0.05, deterministic=True)
        assert found.recompute_seconds == 3.0


def test_any_schedule_can_be_loaded_with_slots_enough(pace: Callable[[int], int]) -> None:
    for seed in range(pace(60)):
        rng = random.Random(seed)
        problem = problem_at(oracle.random_graph(seed, operations=10), 0.7)
        free = [o for o, operation in enumerate(problem.graph.operations) if operation.recomputable]
        before = {index: rng.choices([o for o in free if o < index] or [0], k=rng.randrange(12)) for index in (6, 9)}
        schedule = Schedule.with_recomputations(problem.graph, before if free and free[0] < 6 else {})
        annealing = RerunSet(problem, seed, room_for=schedule)
        annealing.reset(annealing.keys_of(schedule))
        assert annealing.schedule(reruns(annealing)) == schedule
        assert_agrees_with_the_simulator(annealing)


def test_a_schedule_that_runs_most_of_the_step_again_and_again_has_room(pace: Callable[[int], int]) -> None:
    problem = problem_at(oracle.random_graph(3, operations=10), 0.7)
    problem = replace(problem, costs=tuple(replace(cost, seconds=1.0) for cost in problem.costs))  # sums are exact
    free = [o for o, operation in enumerate(problem.graph.operations) if operation.recomputable and o < 9]
    schedule = Schedule.with_recomputations(problem.graph, {9: free * (pace(800) // 4)})
    assert not RerunSet(problem, 0, slots=len(schedule.order)).can_be(schedule, math.inf)
    annealing = RerunSet(problem, 0, room_for=schedule)
    annealing.reset(annealing.keys_of(schedule))
    assert annealing.schedule(reruns(annealing)) == schedule
    assert annealing.can_be(schedule, problem.evaluate(schedule).peak_bytes)
    assert_agrees_with_the_simulator(annealing)


def dear_first(pairs: int = 6) -> Problem:
    """Pose a problem whose plans make pairs of operations again from the last to the first, what is large before it."""
    reads = [read for number in range(pairs) for read in ((), (2 * number,))] + [(*range(1, 2 * pairs, 2),)]
    graph = by_reads(reads, [size for number in range(pairs) for size in (10 + number, 1)] + [1])
    return Problem(graph=graph, costs=(OperationCost(seconds=1.0),) * len(reads), budget_bytes=10 + pairs)


# ----------------------------------------------------------------------------- the solver


@needs_numba
@pytest.mark.parametrize("seeds", tiered([range(60), range(60, 200)], quick=[range(60)]))
def test_random_graphs_come_within_a_hundredth_of_the_optimum(seeds: range) -> None:
    compared, missed = [], []
    for seed in seeds:
        graph, costs = oracle.random_graph(seed, operations=4 + seed % 6, plain=seed % 3 == 0)
        floor = max(first_run_bytes(graph, costs))
        top = problem_at((graph, costs), 1.0).budget_bytes
        problem = Problem(graph=graph, costs=costs, budget_bytes=floor + (top - floor) * (seed % 4) // 5)
        best = oracle.cheapest(problem)
        if best is None:
            with pytest.raises(InfeasibleBudgetError):
                solvers.solve(problem, "search", time_limit_seconds=0.01, deterministic=True)
            continue
        try:
            solution = solvers.solve(problem, "search", time_limit_seconds=0.05, deterministic=True)
        except InfeasibleBudgetError:
            missed.append(seed)
            continue
        assert solution.recompute_seconds >= best[0] - 1e-9
        total, least = (seconds + problem.baseline.seconds for seconds in (solution.recompute_seconds, best[0]))
        compared.append(seed)
        if total > 1.01 * least:
            missed.append(seed)
    assert len(compared) > 0.4 * len(seeds)
    assert not missed


@needs_numba
def test_a_plan_to_start_from_is_never_made_worse() -> None:
    problem = problem_at(oracle.resnet_like(16), 0.4)
    incumbent = solvers.solve(problem, "sqrt")
    better = improved(problem, incumbent.schedule, seconds=1.0)
    assert better.recompute_seconds < incumbent.recompute_seconds
    same = improved(problem, better.schedule, bound=better.recompute_seconds)
    assert same.schedule == better.schedule


@needs_numba
def test_it_goes_on_from_a_plan_whose_order_needs_more_slots() -> None:
    problem = dear_first()
    known = Schedule((*range(12), 10, 11, 8, 9, 6, 7, 4, 5, 2, 3, 0, 1, 12))
    assert slots_needed(known) == 6 > SLOTS
    assert problem.evaluate(known).peak_bytes <= problem.budget_bytes
    assert improved(problem, known, seconds=1.0).recompute_seconds == 10.0


@needs_numba
def test_plans_that_are_there_stay_what_they_are_where_one_needs_more_slots() -> None:
    problem = dear_first()
    rounds = search._Rounds(problem, seed=0)
    one = Schedule((*range(12), 8, 9, 2, 3, 12))
    rounds.pool.enter(Member(99.0, tuple(rounds.reruns.keys_of(one))))
    incumbent = Incumbent(problem)
    other = Schedule((*range(12), 10, 11, 8, 9, 6, 7, 4, 5, 2, 3, 0, 1, 12))
    assert incumbent.update(other, "known")
    rounds.adopt(incumbent)
    assert [rounds.reruns.schedule(member.keys) for member in rounds.pool.members] == [other, one]


@needs_numba
def test_it_stops_when_told_so() -> None:
    problem = problem_at(oracle.resnet_like(16), 0.4)
    incumbent = solvers.solve(problem, "sqrt").schedule
    started = time.perf_counter()
    assert improved(problem, incumbent, seconds=60, is_over=lambda: True).schedule == incumbent
    assert time.perf_counter() - started < 30


def test_without_numba_it_is_unavailable_and_auto_says_that_it_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.solvers.search.find_spec", lambda name: None)
    with pytest.raises(SolverUnavailableError, match=r"checkpoint-planner\[search\]"):
        solvers.solve(problem_at(oracle.resnet_like(8), 0.5), "search")
    told: list[str] = []
    problem = problem_at(oracle.resnet_like(30), 0.25)
    assert solvers.solve(problem, time_limit_seconds=0.5, progress=told.append).peak_bytes <= problem.budget_bytes
    assert any("numba" in line and "going without" in line for line in told)


# ----------------------------------------------------------------------------- beside the integer programme


@needs_numba
def test_auto_carries_on_where_the_integer_programme_stalls() -> None:
    problem = problem_at(oracle.resnet_like(50), 0.25)
    told: list[str] = []
    solution = solvers.solve(problem, time_limit_seconds=2, progress=told.append)
    step = problem.baseline.seconds
    assert 0.15 * step <= solution.lower_bound_seconds <= solution.recompute_seconds <= 0.2 * step
    assert any("(by search)" in line and "any plan at least" in line for line in told)


@pytest.mark.parametrize(("cores", "annealings"), [(2, 1), (4, 3), (64, 4)])
def test_cores_that_are_left_anneal_each_with_other_moves(
    cores: int, annealings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def improve(self: object, incumbent: object, *, effort: SolveLimits, is_over: Callable[[], bool]) -> None:
        seeds.append(effort.seed)

    monkeypatch.setattr("planner.solvers.auto.available_cores", lambda: cores)
    monkeypatch.setattr(type(SOLVER), "require", lambda self: None)
    monkeypatch.setattr(type(SOLVER), "prepare", lambda *_: True)
    monkeypatch.setattr(type(SOLVER), "improve", improve)
    solvers.solve(problem_at(oracle.resnet_like(30), 0.25), time_limit_seconds=0.3, seed=7)
    assert sorted(seeds) == [*range(7, 7 + annealings)]


def test_where_the_integer_programme_closes_the_gap_annealing_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise AssertionError("the search was started")

    monkeypatch.setattr(type(SOLVER), "improve", fail)
    problem = problem_at(transformer(6, vocabulary=1), 0.8)
    solution = solvers.solve(problem, time_limit_seconds=30)
    assert solution.solver == "ilp"
    assert solution.recompute_seconds - solution.lower_bound_seconds <= 3e-4 * problem.baseline.seconds


def test_kernels_are_compiled_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_cache_folder", lambda: tmp_path)
    with open(tmp_path / "annealing.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert search._compile_beside() is None


@needs_numba
def test_kernels_that_were_compiled_are_found() -> None:
    SOLVER.solve(search.smallest(), effort=SolveLimits(deterministic=True))
    assert search.is_compiled()
