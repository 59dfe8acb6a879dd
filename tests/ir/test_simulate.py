"""The core: lifetimes, the simulator, schedules and claims, each against a second way to get the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import ClaimMismatchError, ScheduleError, UsageError
from planner.ir import problem as problems
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.problem import Problem, Solution, confirm
from planner.ir.schedule import Schedule, recompute_lazily
from planner.ir.simulator import lifetimes, simulate
from tests import oracle
from tests.example_graphs import by_reads

seeds = st.integers(0, 10**6)


def bytes_by_scanning(graph: TrainingGraph, costs: Sequence[OperationCost], order: Sequence[int]) -> list[int]:
    """Recompute what is in memory at each run by looking, from each moment, both ways along the order."""
    timeline = []
    for now, running in enumerate(order):
        total = costs[running].workspace_bytes
        for u, value in enumerate(graph.values):
            maker = graph.producer[u]
            births = [p for p, index in enumerate(order[: now + 1]) if index == maker]
            if not births:
                continue
            later_births = [p for p in range(now + 1, len(order)) if order[p] == maker]
            if value.retained:
                total += value.size_bytes * (2 if births[-1] == now and len(births) > 1 else 1)
                continue
            reads = [p for p in range(now, len(order)) if u in graph.operations[order[p]].inputs]
            horizon = later_births[0] if later_births else len(order)
            if births[-1] == now or any(p < horizon for p in reads):
                total += value.size_bytes
        for index, operation in enumerate(graph.operations):
            runs = [p for p, ran in enumerate(order) if ran == index]
            if len(runs) > 1 and runs[0] <= now <= runs[-1]:
                total += operation.state_bytes
        timeline.append(total)
    return timeline


def random_schedule(graph: TrainingGraph, rng: random.Random) -> Schedule:
    """Rerun anything that may be, anywhere."""
    before: dict[int, list[int]] = {}
    for step in range(1, len(graph.operations)):
        candidates = [index for index in range(step) if graph.operations[index].recomputable]
        before[step] = [index for index in candidates if rng.random() < 0.2]
    return Schedule.with_recomputations(graph, before)


@given(seeds, st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_the_timeline_is_what_scanning_the_order_finds(seed: int, count: int) -> None:
    graph, costs = oracle.random_graph(seed, operations=count)
    schedule = random_schedule(graph, random.Random(seed))
    evaluation = simulate(graph, costs, schedule)
    expected = bytes_by_scanning(graph, costs, schedule.order)
    assert list(evaluation.timeline_bytes) == expected
    assert evaluation.peak_bytes == max(expected)
    assert evaluation.peak_position == expected.index(max(expected))
    assert evaluation.seconds == pytest.approx(sum(costs[index].seconds for index in schedule.order))
    once = sum(cost.seconds for cost in costs)
    assert evaluation.recompute_seconds == pytest.approx(evaluation.seconds - once)


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_every_read_falls_in_the_life_of_one_copy(seed: int) -> None:
    graph, _ = oracle.random_graph(seed, operations=8)
    schedule = random_schedule(graph, random.Random(seed))
    copies = lifetimes(graph, schedule)
    for position, index in enumerate(schedule.order):
        for u in graph.operations[index].inputs:
            alive = [copy for copy in copies if copy.value == u and copy.born < position <= copy.died]
            assert len(alive) == 1
    for copy in copies:
        assert schedule.order[copy.born] == graph.producer[copy.value]


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_recomputations_and_with_recomputations_are_inverse(seed: int) -> None:
    graph, _ = oracle.random_graph(seed, operations=8)
    schedule = random_schedule(graph, random.Random(seed))
    assert Schedule.with_recomputations(graph, schedule.recomputations()) == schedule


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_lazy_recomputation_runs_and_holds_nothing_that_was_dropped(seed: int) -> None:
    graph, costs = oracle.random_graph(seed, operations=9, plain=True)
    rng = random.Random(seed)
    step = rng.randrange(len(graph.operations))
    touched = {*graph.operations[step].inputs, *graph.operations[step].outputs}
    made = [u for u, maker in enumerate(graph.producer) if maker < step]
    dropped = {u for u in made if u not in touched and rng.random() < 0.5}
    schedule = recompute_lazily(graph, {step: dropped})
    simulate(graph, costs, schedule)
    moment = next(p for p, index in enumerate(schedule.order) if index == step)
    for copy in lifetimes(graph, schedule):
        assert not (copy.value in dropped and copy.born <= moment <= copy.died)


def chain(**of_first: object) -> TrainingGraph:
    """Make a chain of three operations, the first with some attributes changed."""
    graph = by_reads([(), (0,), (0, 1)], [4, 4, 4])
    first, *rest = graph.operations
    return replace(graph, operations=(replace(first, **of_first), *rest))


UNIT = (OperationCost(seconds=1.0),) * 3


@pytest.mark.parametrize(
    ("order", "complaint"), [((1, 0, 2), "not been made"), ((0, 1), "never runs"), ((0, 1, 0, 2), "not recomputable")]
)
def test_an_impossible_schedule_is_refused(order: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        simulate(chain(recomputable=False), UNIT, Schedule(order))


def test_random_state_counts_from_the_first_run_to_the_last_and_only_if_there_are_two() -> None:
    graph = chain(state_bytes=16)
    assert simulate(graph, UNIT, Schedule((0, 1, 2))).timeline_bytes == (4, 8, 12)
    assert simulate(graph, UNIT, Schedule((0, 1, 0, 2))).timeline_bytes == (20, 24, 24, 12)


def test_a_first_run_takes_longer_than_a_recompute() -> None:
    costs = tuple(OperationCost(seconds=1.0, cold_seconds=cold) for cold in (0.25, 0.5, 0.0))
    once, twice = (simulate(chain(), costs, Schedule(order)) for order in ((0, 1, 2), (0, 1, 0, 2)))
    assert (once.seconds, twice.seconds, twice.recompute_seconds) == (3.75, 4.75, 1.0)


@pytest.mark.parametrize(
    ("order", "complaint"), [((0, 2, 1), "against the base order"), ((0, 1, 2, 0), "after the end")]
)
def test_first_runs_must_be_in_base_order(order: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        Schedule(order).recomputations()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"peak_bytes": 11}, "a peak of 11"),
        ({"recompute_seconds": 0.5}, "of recompute"),
        ({"lower_bound_seconds": 1.0}, "above its own"),
    ],
)
def test_a_false_claim_is_refused(changes: dict[str, object], complaint: str) -> None:
    graph = chain()
    problem = Problem(graph=graph, costs=UNIT, budget_bytes=100)
    true: dict[str, object] = {"peak_bytes": 12, "recompute_seconds": 0.0}
    good = Solution(solver="x", schedule=Schedule.keep_all(graph), **true)  # type: ignore[arg-type]
    assert confirm(problem, good).peak_bytes == 12
    bad = Solution(solver="x", schedule=Schedule.keep_all(graph), **{**true, **changes})  # type: ignore[arg-type]
    with pytest.raises(ClaimMismatchError, match=complaint):
        confirm(problem, bad)
    with pytest.raises(ClaimMismatchError, match="to keep 11 bytes"):
        confirm(Problem(graph=graph, costs=UNIT, budget_bytes=11), good)


def test_a_problem_needs_a_cost_for_each_operation() -> None:
    with pytest.raises(UsageError, match="2 costs for 3 operations"):
        Problem(graph=chain(), costs=UNIT[:2], budget_bytes=1)


def test_what_was_evaluated_last_is_not_simulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, simulated = chain(), []
    monkeypatch.setattr(problems, "simulate", lambda *given: simulated.append(given) or simulate(*given))
    problem = Problem(graph=graph, costs=UNIT, budget_bytes=100)
    once, twice = Schedule.keep_all(graph), Schedule((0, 1, 0, 2))
    for schedule in (once, Schedule.keep_all(graph), twice, twice, once):
        assert problem.evaluate(schedule) == simulate(graph, UNIT, schedule)
    assert len(simulated) == 3


def test_what_a_backward_computes_again_is_not_held() -> None:
    """The backward of tanh computes it again from x, and so the step holds x alone."""
    values = tuple(Value(name=name, size_bytes=size) for name, size in (("x", 4), ("tanh", 4), ("y", 4), ("dx", 4)))
    made = [("x", (), (0,)), ("tanh", (0,), (1,)), ("y", (1,), (2,)), ("loss", (2,), ()), ("dx", (0, 1), (3,))]
    operations = tuple(
        Operation(name=name, key=f"|{name}|f0", target=name, inputs=reads, outputs=makes, again=name == "tanh")
        for name, reads, makes in made
    )
    phases = [Phase.FORWARD] * 3 + [Phase.LOSS, Phase.BACKWARD]
    graph = TrainingGraph(
        operations=tuple(replace(one, phase=phase) for one, phase in zip(operations, phases, strict=True)),
        values=values,
    )
    assert Schedule.as_written(graph).order == (0, 1, 2, 3, 1, 4)
    plain = replace(graph, operations=tuple(replace(one, again=False) for one in graph.operations))
    assert Schedule.as_written(plain) == Schedule.keep_all(plain)
