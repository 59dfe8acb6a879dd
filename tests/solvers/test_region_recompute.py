"""Recomputations stay in their regions."""

from __future__ import annotations

import random

import pytest

from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.host import Host
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule, between_units, recompute_in_regions
from planner.solvers import solve
from tests.example_graphs import ROUND_BYTES, Builder


def chain(regions: list[str]) -> TrainingGraph:
    """Return a forward with one region after the other, of two operations each, and its backward."""
    b = Builder()

    def add(phase: Phase, region: str, inputs: list[int], *, crosses: bool) -> int:
        (made,) = b.add("", inputs, [ROUND_BYTES], phase=phase, region=region, recomputable=not crosses)
        return made

    given = add(Phase.FORWARD, "", [], crosses=True)
    inner = {}
    for region in regions:
        first = add(Phase.FORWARD, region, [given], crosses=False)
        inner[region] = [given, first]
        given = add(Phase.FORWARD, region, [first], crosses=True)
    gradient = add(Phase.LOSS, "", [given], crosses=True)
    for region in reversed(regions):
        before, first = inner[region]
        half = add(Phase.BACKWARD, region, [gradient, first], crosses=False)
        gradient = add(Phase.BACKWARD, region, [half, before], crosses=True)
    return b.graph("chain", {})


def strays(graph: TrainingGraph, schedule: Schedule) -> list[int]:
    """Return what runs again while another region runs."""
    regions = [operation.region for operation in graph.operations]
    before = schedule.recomputations()
    return [a for index, again in before.items() for a in again if regions[a] not in ("", regions[index])]


def test_what_runs_again_elsewhere_is_put_off_until_its_region_runs() -> None:
    graph = chain(["a", "b"])
    early = Schedule.with_recomputations(graph, {6: (1,), 9: (3,)})
    assert strays(graph, early) == [1, 3]
    late = recompute_in_regions(graph, early)
    assert strays(graph, late) == []
    assert late.recomputations() == {8: (1,)}  # the region of 3 does not run again


@pytest.mark.parametrize("rate", [None, 3.0, 300.0])
@pytest.mark.parametrize("seed", range(6))
def test_solutions_stay_in_their_regions_and_in_the_budget(seed: int, rate: float | None) -> None:
    rng = random.Random(seed)
    graph = chain([f"block {number}" for number in range(rng.randint(2, 5))])
    costs = tuple(OperationCost(seconds=rng.uniform(1, 9)) for _ in graph.operations)
    free = Problem(graph=graph, costs=costs, budget_bytes=0).baseline.peak_bytes
    host = None if rate is None else Host(bytes_per_second=rate * ROUND_BYTES, budget_bytes=2**40, least_bytes=1)
    problem = Problem(graph=graph, costs=costs, budget_bytes=free - ROUND_BYTES, host=host)
    solution = solve(problem, time_limit_seconds=0.5, deterministic=True)
    assert strays(graph, solution.schedule) == []
    assert solution.peak_bytes <= problem.budget_bytes
    assert solution.lower_bound_seconds <= solution.added_seconds
    idle = between_units(graph, solution.schedule.order)
    for offload in solution.schedule.offloads:
        ended, begun = idle[graph.operations[graph.producer[offload.value]].region]
        assert not any(ended < position < begun for position in (offload.leaves, *offload.returns))
    assert bool(solution.schedule.offloads) == (rate is not None)
