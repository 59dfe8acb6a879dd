"""The lowest peak: no bound on it is above what some plan reaches."""

from __future__ import annotations

import heapq
import random
from functools import partial
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.common.limits import SolveLimits
from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.problem import Problem
from planner.solving import peak_proof
from planner.solving.minimum_peak_search import lowest_plan
from planner.solving.peak_bounds import first_run_bytes, lowest_schedule, minimum_peak, proven_peak
from planner.solving.peak_proof import _SMALL, Births, proven_by_last_births
from tests.example_graphs import Builder, by_reads
from tests.oracle import lowest, random_graph
from tests.tiers import tiered

LIMITS = SolveLimits(time_limit_seconds=5.0, deterministic=True)

STREAM, HIDDEN, WEIGHT = 64, 256, 64


def residual_layers(count: int) -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    """Return layers that widen, bend and narrow what a stream brings them, and add it to that."""
    builder = Builder()
    (stream,) = builder.add("embed", [], [STREAM])
    saved = []
    for _ in range(count):
        (wide,) = builder.add("up", [stream], [HIDDEN])
        (bent,) = builder.add("bend", [wide], [HIDDEN])
        (narrow,) = builder.add("down", [bent], [STREAM])
        saved.append((stream, wide, bent))
        (stream,) = builder.add("add", [stream, narrow], [STREAM])
    (gradient,) = builder.add("loss", [stream], [STREAM], phase=Phase.LOSS)
    for stream, wide, bent in reversed(saved):
        back = partial(builder.add, phase=Phase.BACKWARD)
        (of_bent,) = back("down'", [gradient], [HIDDEN])
        back("weight'", [gradient, bent], [WEIGHT], retained=True)
        (of_wide,) = back("bend'", [of_bent, wide], [HIDDEN])
        (of_stream,) = back("up'", [of_wide], [STREAM])
        back("weight'", [of_wide, stream], [WEIGHT], retained=True)
        (gradient,) = back("add'", [gradient, of_stream], [STREAM])
    return builder.graph("residual", {}), tuple(builder.costs)


def random_step(seed: int, forward: int) -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    """Return a small random forward and its backward, which also makes what is retained."""
    rng, builder = random.Random(seed), Builder()
    made: list[int] = []
    tape: list[tuple[list[int], int]] = []
    for _ in range(forward):
        inputs = sorted({*rng.choices(made, k=rng.choice([1, 1, 2]))}) if made else []
        made += builder.add("forward", inputs, [64 * rng.choice([1, 2, 4])], recomputable=rng.random() > 0.1)
        tape.append((inputs, made[-1]))
    gradients = dict.fromkeys(made[-1:], builder.add("loss", made[-1:], [64], phase=Phase.LOSS)[0])
    back = partial(builder.add, phase=Phase.BACKWARD)
    for inputs, output in reversed(tape):
        if output not in gradients:
            continue
        read = [gradients[output], *(u for u in dict.fromkeys((*inputs, output)) if rng.random() < 0.6)]
        if rng.random() < 0.5:
            back("weight'", read, [64], retained=True)
        for u in inputs:
            (own,) = back("backward", read, [builder.values[u].size_bytes])
            if u in gradients:
                (own,) = back("add'", [gradients[u], own], [builder.values[u].size_bytes])
            gradients[u] = own
    return builder.graph("random", {}), tuple(builder.costs)


@pytest.mark.parametrize("seed", tiered(range(300), quick=range(40)))
def test_no_bound_is_above_the_lowest_peak(seed: int) -> None:
    for plain in (False, True):
        graph, costs = random_graph(seed, operations=7, plain=plain)
        bound, where = proven_peak(graph, costs)
        assert max(first_run_bytes(graph, costs)) <= bound <= lowest(graph, costs)
        assert 0 <= where < len(graph.operations)


def _exactly(graph: TrainingGraph, costs: tuple[OperationCost, ...]) -> int:
    """Follow all births of all operations, one by one, with nothing left out or remembered."""
    needs_bytes = first_run_bytes(graph, costs)
    proof = Births(graph, costs, _SMALL * max(needs_bytes))

    def least(live: frozenset[int], peak_bytes: int) -> int:
        known = {live: peak_bytes}
        queue = [(peak_bytes, 0, live)]
        while queue:
            peak, _, live = heapq.heappop(queue)
            if not live:
                return peak
            for size_bytes, earlier in proof.births(live):
                highest = max(peak, size_bytes)
                if highest < known.get(earlier, highest + 1):
                    known[earlier] = highest
                    heapq.heappush(queue, (highest, len(known), earlier))
        raise AssertionError("everything begins with nothing")

    alone = []
    for index, size_bytes in enumerate(needs_bytes):
        proof.before(index)
        alone.append(least(proof.inputs[index], size_bytes))
    return max(alone)


@pytest.mark.parametrize("seed", tiered(range(400), quick=range(60)))
def test_what_is_left_out_and_remembered_changes_nothing(seed: int) -> None:
    """Values that can be made again, pairs, cuts, and what earlier operations found: all of it only saves work."""
    for plain in (False, True):
        graph, costs = random_graph(seed, operations=8 + seed % 5, plain=plain)
        assert proven_peak(graph, costs)[0] == _exactly(graph, costs)


@settings(max_examples=80)
@given(seed=st.integers(0, 10**6))
def test_no_bound_is_above_the_lowest_peak_of_a_training_step(seed: int) -> None:
    graph, costs = random_step(seed, forward=3)
    bound, _ = proven_peak(graph, costs)
    assert max(first_run_bytes(graph, costs)) <= bound <= lowest(graph, costs)


@pytest.mark.parametrize("looks", [0, 1, 5, 20, 100])
def test_a_bound_that_ran_out_of_work_is_lower_and_no_higher(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_proof, "_LOOKS_PER_OPERATION", looks)
    for seed in range(40):
        graph, costs = random_graph(seed, operations=10, plain=seed % 2 == 0)
        needs_bytes = first_run_bytes(graph, costs)
        assert max(needs_bytes) <= proven_by_last_births(graph, costs, needs_bytes)[0] <= _exactly(graph, costs)


@pytest.mark.skipif(find_spec("numba") is None, reason="annealing needs numba")
def test_a_gradient_that_waits_over_the_largest_operation_of_a_layer_counts() -> None:
    """It is needed after that operation, and making it again passes the same kind of operation of the layer before.

    Which of the first runs needs most says nothing of that; neither do the dozen that need most.
    """
    graph, costs = residual_layers(count=6)
    problem = Problem(graph=graph, costs=costs, budget_bytes=0)
    largest = max(first_run_bytes(graph, costs))
    bound, _ = proven_peak(graph, costs)
    assert bound == largest + STREAM
    reached = problem.evaluate(lowest_plan(problem, lowest_schedule(problem), LIMITS)).peak_bytes
    assert bound <= reached <= 1.01 * bound


def test_making_an_input_while_another_waits_counts() -> None:
    reads = [(), (0,), (1,), (2,), (3, 0)]
    graph = by_reads(reads, [4, 1, 9, 1, 1], forward=4)
    costs = (OperationCost(seconds=1.0),) * len(reads)
    assert max(first_run_bytes(graph, costs)) == 10
    floor = minimum_peak(graph, costs)
    assert floor.proven_peak_bytes == lowest(graph, costs) == floor.found_peak_bytes


def test_a_step_without_operations_needs_nothing() -> None:
    assert proven_peak(TrainingGraph(operations=(), values=()), ()) == (0, 0)
