"""The dynamic programme over chains: against Revolve's closed form, the oracle, and what it says of itself."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import replace
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import solvers
from planner.common.limits import SolveLimits
from planner.errors import InfeasibleBudgetError
from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.solvers import chain_dp
from planner.solving.segmentations import chain_places
from tests import oracle
from tests.example_graphs import Builder, transformer
from tests.planned import problem_at

Step = tuple[TrainingGraph, tuple[OperationCost, ...]]


def chain(states: list[int], tapes: list[int], seconds: list[float], *, workspace_bytes: int = 0) -> Step:
    """Make a chain: step k reads state k-1 and makes state k; its backward reads its tape and state k-1.

    A tape of 0 bytes is none. The first state cannot be made again.
    """
    b = Builder(alignment_bytes=1)
    state = b.add("", [], states[:1], recomputable=False, seconds=1.0)
    saved = []
    for k, cost in enumerate(seconds, 1):
        made = b.add("", state[:1], [states[k], *([tapes[k - 1]] if tapes[k - 1] else [])], seconds=cost)
        saved.append([state[0], *made[1:]])
        state = made
    gradient = b.add("", state[:1], [0], phase=Phase.LOSS, seconds=1.0)
    for tape in reversed(saved):
        gradient = b.add("", [*gradient, *tape], [0], phase=Phase.BACKWARD, seconds=1.0, workspace=workspace_bytes)
    return b.graph("", {}), tuple(b.costs)


def runs_of(schedule: Schedule, graph: TrainingGraph) -> list[int]:
    return [schedule.order.count(index) for index in range(len(graph.operations))]


# ----------------------------------------------------------------------------- uniform chains


def uniform(steps: int, snapshots: int) -> Problem:
    """Return a chain of equal steps and just the memory for some snapshots.

    While a step is run again there are the snapshots, a state and the next one; during a backward
    the snapshots, the state that it reads, and a byte of workspace.
    """
    graph, costs = chain([1] * (steps + 1), [0] * steps, [1.0] * steps, workspace_bytes=1)
    return Problem(graph=graph, costs=costs, budget_bytes=snapshots + 2)


def advances(steps: int, snapshots: int) -> int:
    """Return the fewest forward steps that reverse a chain, those that are taped not counted.

    Griewank and Walther, "Algorithm 799: revolve", 2000: r * l - binomial(c + r, r - 1).
    """
    repeats = 0
    while comb(snapshots + repeats, snapshots) < steps:
        repeats += 1
    return repeats * steps - comb(snapshots + repeats, repeats - 1)


@pytest.mark.parametrize("steps", [2, 3, 5, 10, 21, 50])
@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 9])
def test_uniform_chains_take_as_many_forward_steps_as_revolve(steps: int, snapshots: int) -> None:
    solution = solvers.solve(uniform(steps, snapshots), "chain-dp")
    # The step's own forward runs all steps once; Revolve runs the last one taped only.
    assert solution.recompute_seconds + steps - 1 == advances(steps, snapshots)


# ----------------------------------------------------------------------------- any chain


@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.4, 0.55, 0.7, 0.85]))
@settings(max_examples=20, deadline=None)
def test_random_chains_never_beat_the_optimum_and_often_reach_it(seed: int, share: float) -> None:
    rng = random.Random(seed)
    steps = rng.choice([3, 4])
    states = [rng.choice([1, 2, 4]) for _ in range(steps + 1)]
    tapes = [rng.choice([0, 1, 3, 6]) for _ in range(steps)]
    problem = problem_at(chain(states, tapes, [float(rng.choice([1, 2, 5])) for _ in range(steps)]), share)
    exact = oracle.cheapest(problem)
    try:
        solution = solvers.solve(problem, "chain-dp")
    except InfeasibleBudgetError:
        return
    assert exact is not None
    assert solution.peak_bytes <= problem.budget_bytes
    assert solution.recompute_seconds >= exact[0] - 1e-9


# ----------------------------------------------------------------------------- training steps


@pytest.mark.parametrize("share", [0.25, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("step", [transformer(6, vocabulary=1), oracle.resnet_like(8)], ids=["gpt", "cnn"])
def test_training_steps_cost_no_more_than_the_square_root_rule(step: Step, share: float) -> None:
    paid = {"chain-dp": float("inf"), "sqrt": float("inf")}
    for name in paid:
        with suppress(InfeasibleBudgetError):
            paid[name] = solvers.solve(problem_at(step, share), name).recompute_seconds
    assert paid["chain-dp"] <= paid["sqrt"]


def test_equal_stages_are_solved_once() -> None:
    problem = problem_at(transformer(24, vocabulary=1), 0.5)
    stages = chain_dp.Chain(problem, chain_places(problem.graph))
    names = chain_dp.run_names(stages)
    assert stages.count > 48
    assert len({name for row in names for name in row}) < stages.count**2 / 4


@pytest.mark.slow
def test_depth_is_no_obstacle() -> None:
    problem = problem_at(transformer(48, vocabulary=1), 0.3)
    started = time.perf_counter()
    solvers.solve(problem, "chain-dp")
    assert time.perf_counter() - started < 20  # two seconds where nothing else runs


def test_a_graph_that_cannot_be_cut_is_said_to_be_one() -> None:
    b = Builder()
    x = b.add("only", [], [640])
    y = b.add("back", x, [640], phase=Phase.BACKWARD)
    b.add("back", [*x, *y], [64], phase=Phase.BACKWARD)
    graph = b.graph("one", {"parameters": 64})
    problem = Problem(graph=graph, costs=tuple(b.costs), budget_bytes=700)
    with pytest.raises(InfeasibleBudgetError, match=r"no cut points: no plan of the chain of stages keeps 764"):
        solvers.get("chain-dp").solve(problem, effort=SolveLimits())
    # No solver finds a plan: that says more.
    with pytest.raises(InfeasibleBudgetError, match=r"^no plan keeps 764 bytes; a plan is known for 1408") as caught:
        solvers.solve(problem, "chain-dp")
    assert caught.value.minimum_feasible_peak_bytes == 1344 + 64 and caught.value.is_proven


def test_what_cannot_be_made_again_is_never_run_twice() -> None:
    graph, costs = transformer(6, vocabulary=1)
    frozen = tuple(replace(o, recomputable="drop" not in o.target) for o in graph.operations)
    graph = TrainingGraph(operations=frozen, values=graph.values)
    solution = solvers.solve(problem_at((graph, costs), 0.6), "chain-dp")
    runs = runs_of(solution.schedule, graph)
    assert all(count == 1 for count, o in zip(runs, frozen, strict=True) if not o.recomputable)
    assert max(runs) > 1
