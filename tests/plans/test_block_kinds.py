"""Few kinds of blocks, where each is compiled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.plans.block_kinds import MOST_KINDS, with_few_kinds

INNER = 3
"""Results inside of a block that its backward reads."""


def blocks(depth: int) -> TrainingGraph:
    """Return a step of equal blocks: each makes results of 1, 2 and 4 bytes, and its backward reads them."""
    operations: list[Operation] = []
    values: list[Value] = []

    def add(phase: Phase, region: str, inputs: tuple[int, ...], size_bytes: int, *, crosses: bool = True) -> int:
        values.append(Value(name=f"v{len(values)}", size_bytes=size_bytes))
        name = f"{region}|o|{phase[0]}{len(operations) if not region else sum(o.region == region for o in operations)}"
        operations.append(
            Operation(
                name=f"o{len(operations)}",
                key=name,
                target="o",
                inputs=inputs,
                outputs=(len(values) - 1,),
                phase=phase,
                region=region,
                recomputable=not crosses,
            )
        )
        return len(values) - 1

    x = add(Phase.FORWARD, "", (), 1)
    inside = []
    for number in range(depth):
        given_, made = x, []
        for size in range(INNER):
            made.append(add(Phase.FORWARD, f"b{number}", (given_,), 2**size, crosses=False))
        x = add(Phase.FORWARD, f"b{number}", (given_, *made), 1)
        inside.append((given_, made))
    gradient = add(Phase.LOSS, "", (x,), 1)
    for number in reversed(range(depth)):
        given_, made = inside[number]
        for one in made:
            gradient = add(Phase.BACKWARD, f"b{number}", (gradient, one, given_), 1)
    return TrainingGraph(operations=tuple(operations), values=tuple(values))


def schedule_of(graph: TrainingGraph, asked: list[set[int]]) -> Schedule:
    """Let each block recompute some of its results, each right before it is read."""
    before = {}
    for index, operation in enumerate(graph.operations):
        if operation.phase is Phase.BACKWARD:
            (again,) = (
                producer
                for producer in (graph.producer[v] for v in operation.inputs[1:2])
                if graph.operations[producer].region == operation.region
            )
            inner = [i for i, o in enumerate(graph.operations) if o.region == operation.region].index(again)
            if inner in asked[int(operation.region[1:])]:
                before[index] = (again,)
    return Schedule.with_recomputations(graph, before)


def kinds_in(graph: TrainingGraph, schedule: Schedule) -> int:
    again: dict[str, list[int]] = {o.region: [] for o in graph.operations if o.region}
    for index, runs in schedule.recomputations().items():
        region = graph.operations[index].region
        inside = [i for i, o in enumerate(graph.operations) if o.region == region]
        again[region] += [inside.index(run) for run in runs]
    return len(set(map(tuple, again.values())))


DECISIONS = st.lists(st.sets(st.integers(0, INNER - 1)), min_size=1, max_size=8)


@given(DECISIONS, st.integers(0, 12))
def test_the_budget_is_kept_and_there_are_no_more_kinds_than_before(asked: list[set[int]], spare_bytes: int) -> None:
    graph = blocks(len(asked))
    schedule = schedule_of(graph, asked)
    costs = [OperationCost(seconds=1.0 + index / 100) for index in range(len(graph.operations))]
    free = Problem(graph=graph, costs=costs, budget_bytes=10**6)
    problem = Problem(graph=graph, costs=costs, budget_bytes=free.evaluate(schedule).peak_bytes + spare_bytes)
    few = with_few_kinds(problem, schedule)
    assert problem.evaluate(few).peak_bytes <= problem.budget_bytes
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
