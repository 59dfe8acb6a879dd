"""Few kinds of blocks, where each is compiled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.host import Host
from planner.ir.problem import Problem
from planner.ir.schedule import Offload, Schedule
from planner.plans.block_kinds import MOST_KINDS, with_few_kinds
from tests.example_graphs import ROUND_BYTES, Builder

INNER = 3
"""Results inside of a block that its backward reads."""


def blocks(depth: int) -> TrainingGraph:
    """Return a step of equal blocks: each makes results of 1, 2 and 4 units, and its backward reads them."""
    b = Builder()

    def add(phase: Phase, path: str, inputs: list[int], units: int = 1, *, crosses: bool = True) -> int:
        size = [units * ROUND_BYTES]
        (made,) = b.add("o", inputs, size, module=path, phase=phase, region=path, recomputable=not crosses)
        return made

    x = add(Phase.FORWARD, "", [])
    inside = []
    for number in range(depth):
        before, made = x, []
        for size in range(INNER):
            made.append(add(Phase.FORWARD, f"b{number}", [before], 2**size, crosses=False))
        x = add(Phase.FORWARD, f"b{number}", [before, *made])
        b.add("returns", [x], [], module=f"b{number}", phase=Phase.FORWARD, recomputable=False)
        inside.append((before, made))
    gradient = add(Phase.LOSS, "", [x])
    for number in reversed(range(depth)):
        before, made = inside[number]
        for one in made:
            gradient = add(Phase.BACKWARD, f"b{number}", [gradient, one, before])
    return b.graph("blocks", {})


def schedule_of(graph: TrainingGraph, asked: list[set[int]], sent: list[set[int]] | None = None) -> Schedule:
    """Let each block recompute some of its results, each right before it is read, and fetch others by then."""
    before, moved = {}, {}
    for index, operation in enumerate(graph.operations):
        if operation.phase is Phase.BACKWARD:
            again = graph.producer[operation.inputs[1]]
            inner = [i for i, o in enumerate(graph.operations) if o.region == operation.region].index(again)
            if inner in asked[int(operation.region[1:])]:
                before[index] = (again,)
            elif sent and inner in sent[int(operation.region[1:])]:
                moved[operation.inputs[1]] = index
    schedule = Schedule.with_recomputations(graph, before)
    first = schedule.first_runs()
    ends = {o.module: first[i] for i, o in enumerate(graph.operations) if o.target == "returns"}
    path_of = {value: graph.operations[graph.producer[value]].region for value in moved}
    offloads = (Offload(value, ends[path_of[value]], (first[index],)) for value, index in moved.items())
    return Schedule(schedule.order, tuple(sorted(offloads, key=lambda offload: offload.value)))


def kinds_in(graph: TrainingGraph, schedule: Schedule) -> int:
    again: dict[str, list[int]] = {o.region: [] for o in graph.operations if o.region}
    for index, runs in schedule.recomputations().items():
        region = graph.operations[index].region
        inside = [i for i, o in enumerate(graph.operations) if o.region == region]
        again[region] += [inside.index(run) for run in runs]
    for offload in schedule.offloads:
        region = graph.operations[graph.producer[offload.value]].region
        inside = [i for i, o in enumerate(graph.operations) if o.region == region]
        again[region].append(-1 - inside.index(graph.producer[offload.value]))
    return len(set(map(tuple, again.values())))


SOME = st.sets(st.integers(0, INNER - 1))
DECISIONS = st.lists(st.tuples(SOME, SOME), min_size=1, max_size=8)


@given(DECISIONS, st.integers(0, 12 * ROUND_BYTES))
def test_budgets_are_kept_and_there_are_no_more_kinds_than_before(
    asked: list[tuple[set[int], set[int]]], spare_bytes: int
) -> None:
    graph = blocks(len(asked))
    schedule = schedule_of(graph, *map(list, zip(*asked, strict=True)))
    costs = [OperationCost(seconds=1.0 + index / 100) for index in range(len(graph.operations))]
    free = Problem(graph=graph, costs=costs, budget_bytes=10**6, host=Host(bytes_per_second=1e3, budget_bytes=10**6))
    needed = free.evaluate(schedule)
    host = Host(bytes_per_second=1e3, budget_bytes=needed.host_bytes)
    problem = Problem(graph=graph, costs=costs, budget_bytes=needed.peak_bytes + spare_bytes, host=host)
    few = with_few_kinds(problem, schedule)
    assert problem.evaluate(few).peak_bytes <= problem.budget_bytes
    assert problem.evaluate(few).host_bytes <= host.budget_bytes
    assert kinds_in(graph, few) <= kinds_in(graph, schedule)
    if kinds_in(graph, schedule) <= MOST_KINDS:
        assert few == schedule


def test_rare_kinds_give_way_to_those_that_cost_least() -> None:
    asked = [{0, 1, 2}, {2}, {2}, {1, 2}, {1, 2}, set(), {0}, set()]
    graph = blocks(len(asked))
    schedule = schedule_of(graph, asked)
    costs = [OperationCost(seconds=1.0)] * len(graph.operations)
    problem = Problem(graph=graph, costs=costs, budget_bytes=0)
    problem = Problem(graph=graph, costs=costs, budget_bytes=problem.evaluate(schedule).peak_bytes)
    few = with_few_kinds(problem, schedule)
    assert (kinds_in(graph, schedule), kinds_in(graph, few)) == (5, MOST_KINDS)
    assert problem.evaluate(few).peak_bytes <= problem.budget_bytes
    assert problem.evaluate(few).recompute_seconds <= problem.evaluate(schedule).recompute_seconds + 2
