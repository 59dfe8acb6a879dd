"""Exact answers for tiny graphs, and graphs to ask about: what solver tests are held against."""

from __future__ import annotations

import heapq
import random

from planner.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.problem import Problem
from planner.schedule import Schedule


def cheapest(problem: Problem) -> tuple[float, Schedule] | None:
    """Find the cheapest schedule of all that keep the budget, by Dijkstra over memory contents.

    A state is how many operations have had their first run, which values are in memory, and for
    which operations the random state is still kept. Any sequence of reruns is a path, so the
    result is the true optimum for the base order. Shares no code with the simulator or a solver.
    """
    graph, costs, budget = problem.graph, problem.costs, problem.budget_bytes
    operations, values = graph.operations, graph.values
    count = len(operations)
    retained = frozenset(u for u, value in enumerate(values) if value.retained)
    start = (0, frozenset[int](), frozenset[int]())
    best = {start: 0.0}
    parent: dict[object, tuple[object, int | None]] = {}
    queue: list[tuple[float, int, tuple[int, frozenset[int], frozenset[int]]]] = [(0.0, 0, start)]
    tick = 0

    def held_bytes(held: frozenset[int], states: frozenset[int]) -> int:
        return sum(values[u].size_bytes for u in held) + sum(operations[o].state_bytes for o in states)

    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        done, held, states = state
        if done == count:
            order: list[int] = []
            at: object = state
            while at in parent:
                at, ran = parent[at]
                if ran is not None:
                    order.append(ran)
            return cost, Schedule(tuple(reversed(order)))
        following: list[tuple[float, tuple[int, frozenset[int], frozenset[int]], int | None]] = []
        for u in held - retained:
            following.append((0.0, (done, held - {u}, states), None))
        for o in states:
            following.append((0.0, (done, held, states - {o}), None))
        for o in range(min(done + 1, count)):
            operation = operations[o]
            first = o == done
            if not held.issuperset(operation.inputs):
                continue
            if not first and not (operation.recomputable and (o in states or not operation.state_bytes)):
                continue
            now = held | set(operation.outputs)
            twice = sum(values[u].size_bytes for u in operation.outputs if u in retained and not first)
            for kept in [states, states | {o}] if first and operation.state_bytes and operation.recomputable else [states]:
                if held_bytes(now, kept) + twice + costs[o].workspace_bytes <= budget:
                    following.append((0.0 if first else costs[o].seconds, (done + first, now, kept), o))
        for extra, state_after, ran in following:
            total = cost + extra
            if total < best.get(state_after, float("inf")):
                best[state_after] = total
                parent[state_after] = (state, ran)
                tick += 1
                heapq.heappush(queue, (total, tick, state_after))
    return None


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
            values.append(
                Value(name=f"v{len(values)}", size_bytes=size, retained=not plain and rng.random() < 0.12)
            )
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
