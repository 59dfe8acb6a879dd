"""Exact answers for tiny graphs, and graphs to ask about: what solver tests are held against."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.order import needed
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from tests.example_graphs import Builder

_State = tuple[frozenset[int], frozenset[int], frozenset[int]]
S = TypeVar("S")


def shortest(
    start: S, following: Callable[[S], Iterable[tuple[float, S, Any]]], is_end: Callable[[S], bool]
) -> tuple[float, list[Any]] | None:
    """Return the least cost of a way to an end, by Dijkstra, and the labels along it."""
    best, parent, ticks = {start: 0.0}, dict[S, tuple[S, Any]](), count(1)
    queue = [(0.0, 0, start)]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        if is_end(state):
            labels = []
            while state in parent:
                state, label = parent[state]
                labels.append(label)
            return cost, labels[::-1]
        for extra, after, label in following(state):
            if cost + extra < best.get(after, float("inf")):
                best[after], parent[after] = cost + extra, (state, label)
                heapq.heappush(queue, (cost + extra, next(ticks), after))
    return None


def cheapest(problem: Problem, *, in_any_order: bool = False) -> tuple[float, Schedule] | None:
    """Find the cheapest schedule of all that keep the budget, by Dijkstra over memory contents.

    A state is which operations have had their first run, which values are in memory, and for
    which operations the random state is still kept. Any sequence of reruns is a path, so the
    result is the true optimum for the base order, or for all orders that the step allows.
    Shares no code with the simulator or a solver.
    """
    graph, costs, budget = problem.graph, problem.costs, problem.budget_bytes
    operations, values = graph.operations, graph.values
    all_of_them = len(operations)
    retained = frozenset(u for u, value in enumerate(values) if value.retained)
    before = [set(range(o)) for o in range(all_of_them)]
    if in_any_order:
        before = needed(graph)
    start = (frozenset[int](), frozenset[int](), frozenset[int]())

    def held_bytes(held: frozenset[int], states: frozenset[int]) -> int:
        return sum(values[u].size_bytes for u in held) + sum(operations[o].state_bytes for o in states)

    def steps(state: _State) -> list[tuple[float, _State, int | None]]:
        done, held, states = state
        following: list[tuple[float, _State, int | None]] = []
        for u in held - retained:
            following.append((0.0, (done, held - {u}, states), None))
        for o in states:
            following.append((0.0, (done, held, states - {o}), None))
        for o in range(all_of_them):
            operation = operations[o]
            first = o not in done
            if first and not done.issuperset(before[o]):
                continue
            if not held.issuperset(operation.inputs):
                continue
            if not first and not (operation.recomputable and (o in states or not operation.state_bytes)):
                continue
            now = held | set(operation.outputs)
            twice = sum(values[u].size_bytes for u in operation.outputs if u in retained and not first)
            may_keep = first and operation.state_bytes and operation.recomputable
            for kept in [states, states | {o}] if may_keep else [states]:
                if held_bytes(now, kept) + twice + costs[o].workspace_bytes <= budget:
                    following.append((0.0 if first else costs[o].seconds, (done | {o}, now, kept), o))
        return following

    found = shortest(start, steps, lambda state: len(state[0]) == all_of_them)
    return found and (found[0], Schedule(tuple(ran for ran in found[1] if ran is not None)))


def lowest(graph: TrainingGraph, costs: tuple[OperationCost, ...]) -> int:
    """Return the lowest budget for which there is a plan in the base order, tried one by one."""
    low, high = 0, Problem(graph=graph, costs=costs, budget_bytes=0).baseline.peak_bytes
    while low < high:
        middle = (low + high) // 2
        if cheapest(Problem(graph=graph, costs=costs, budget_bytes=middle)) is None:
            low = middle + 1
        else:
            high = middle
    return low


def random_graph(
    seed: int, *, operations: int = 7, plain: bool = False
) -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    """Make a small graph with everything that a training graph may hold; ``plain`` leaves the rarities out."""
    rng = random.Random(seed)
    made: list[int] = []
    values: list[Value] = []
    built: list[Operation] = []
    for index in range(operations):
        inputs = tuple(sorted(rng.sample(made, min(len(made), rng.choice([1, 1, 2, 2, 3])))))
        if made and made[-1] not in inputs and rng.random() < 0.5:
            inputs = (*inputs, made[-1])
        outputs = []
        for _ in range(1 if plain else rng.choice([1, 1, 1, 2])):
            size = rng.choice([1, 2, 3, 4, 5, 8]) if plain else rng.choice([0, 1, 2, 3, 4, 5, 8])
            outputs.append(len(values))
            values.append(Value(name=f"v{len(values)}", size_bytes=size, retained=not plain and rng.random() < 0.12))
        made.extend(outputs)
        built.append(
            Operation(
                name=f"op{index}",
                key=f"op{index}",
                target="test",
                inputs=inputs,
                outputs=tuple(outputs),
                phase=Phase.FORWARD if index < operations // 2 else Phase.BACKWARD,
                recomputable=plain or rng.random() > 0.15,
                state_bytes=0 if plain or rng.random() > 0.2 else rng.choice([1, 2]),
            )
        )
    costs = tuple(
        OperationCost(
            seconds=float(rng.choice([1, 2, 3, 5, 7])),
            workspace_bytes=0 if plain or rng.random() > 0.25 else rng.choice([1, 3]),
        )
        for _ in built
    )
    return TrainingGraph(operations=tuple(built), values=tuple(values)), costs


def resnet_like(blocks: int = 50, *, batch: int = 64) -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    """Make the training step of a residual CNN whose activations shrink by half at each of four stages."""
    tape = Builder()

    def run(
        name: str,
        inputs: tuple[int, ...],
        *sizes: int,
        flops: float = 0.0,
        phase: Phase = Phase.FORWARD,
        gradients: tuple[int, ...] = (),
        workspace_bytes: int = 0,
    ) -> list[int]:
        """Add an operation with a crude roofline's seconds; ``gradients`` are the sizes of what stays."""
        moved = sum(tape.values[u].size_bytes for u in inputs) + sum(sizes) + sum(gradients)
        seconds = max(flops / 150e12, moved / 1.5e12) + 3e-6
        made = tape.add(name, [*inputs], [*sizes, *gradients], phase=phase, seconds=seconds, workspace=workspace_bytes)
        for u in made[len(sizes) :]:
            tape.values[u] = replace(tape.values[u], retained=True, kind="gradient")
        return made

    size, channels = batch * 56 * 56 * 256 * 4, 256
    (x,) = run("stem", (), size, flops=1e10)
    saved = []
    for block in range(blocks):
        if block and block % max(blocks // 4, 1) == 0 and size > batch * 1000:
            size, channels = size // 2, channels * 2
        at = f"block{block}."
        flops = 2.0 * (size / 4) * channels * 2
        (c1,) = run(at + "conv1", (x,), size // 4, flops=flops, workspace_bytes=size // 8)
        b1, s1 = run(at + "bn1", (c1,), size // 4, channels * 8)
        (r1,) = run(at + "relu1", (b1,), size // 4)
        (c2,) = run(at + "conv2", (r1,), size, flops=flops, workspace_bytes=size // 4)
        b2, s2 = run(at + "bn2", (c2,), size, channels * 8)
        (y,) = run(at + "add_relu", (b2, x), size)
        saved.append((x, c1, s1, r1, c2, s2, y, size, channels, flops))
        x = y
    (feature,) = run("pool", (x,), batch * channels * 4)
    run("loss", (feature,), phase=Phase.LOSS, gradients=(512,))
    (gx,) = run("pool_b", (feature,), size, phase=Phase.BACKWARD)
    for block in reversed(range(blocks)):
        x, c1, s1, r1, c2, s2, y, size, channels, flops = saved[block]
        at = f"block{block}."
        b = Phase.BACKWARD
        in_bytes = tape.values[x].size_bytes
        (gy,) = run(at + "relu_b", (gx, y), size, phase=b)
        gc2, _ = run(at + "bn2_b", (gy, c2, s2), size, phase=b, gradients=(channels * 8,))
        weight = (channels * channels,)
        run(at + "conv2.dw", (gc2, r1), phase=b, flops=flops, gradients=weight, workspace_bytes=size)
        (gr1,) = run(at + "conv2.dx", (gc2,), size // 4, phase=b, flops=flops, workspace_bytes=size // 4)
        (gb1,) = run(at + "relu1_b", (gr1, r1), size // 4, phase=b)
        gc1, _ = run(at + "bn1_b", (gb1, c1, s1), size // 4, phase=b, gradients=(channels * 2,))
        run(at + "conv1.dw", (gc1, x), phase=b, flops=flops, gradients=weight)
        (gi,) = run(at + "conv1.dx", (gc1,), in_bytes, phase=b, flops=flops)
        (gx,) = run(at + "add_b", (gi, gy), in_bytes, phase=b)
    run("stem.dw", (gx,), phase=Phase.BACKWARD, flops=1e10, gradients=(1 << 20,))
    return tape.graph("resnet", {}), tuple(tape.costs)
