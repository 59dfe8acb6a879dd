"""Steps whose operations may run in several orders, and any of these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.order import needed
from tests.example_graphs import Builder


def branches(count: int = 3, depth: int = 4, size: int = 4096) -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    """Return a step whose program takes all branches a layer at a time, and goes back in the same way."""
    builder = Builder()
    (stem,) = builder.add("stem", [], [size])
    rows = [[builder.add("start", [stem], [size], module=f"b{branch}")[0] for branch in range(count)]]
    for layer in range(depth):
        rows.append(
            [builder.add("layer", [end], [size], module=f"b{branch}.{layer}")[0] for branch, end in enumerate(rows[-1])]
        )
    (loss,) = builder.add("losses", rows[-1], [64], kind="output", retained=True)
    (tangent,) = builder.add("loss", [loss], [64], phase=Phase.LOSS, recomputable=False)
    gradients = [tangent] * count
    for layer in reversed(range(depth + 1)):
        for branch in reversed(range(count)):
            builder.add(
                "weight", [gradients[branch], rows[layer][branch]], [64], phase=Phase.BACKWARD,
                kind="gradient", retained=True, module=f"b{branch}.{layer}",
            )  # fmt: skip
            (gradients[branch],) = builder.add(
                "back", [gradients[branch], rows[layer][branch]], [size], phase=Phase.BACKWARD, module=f"b{branch}"
            )
    builder.add("end", gradients, [64], phase=Phase.BACKWARD, kind="gradient", retained=True)
    return replace(builder.graph("branches", {}), runs_after={}), tuple(builder.costs)


def any_order(graph: TrainingGraph, rng: Any) -> tuple[int, ...]:
    """Return some order in which a step's operations can run."""
    waits_for = needed(graph)
    order: list[int] = []
    left = set(range(len(graph.operations)))
    while left:
        ready = sorted(index for index in left if waits_for[index].isdisjoint(left))
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return tuple(order)
