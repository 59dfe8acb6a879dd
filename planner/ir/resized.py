"""A step of other sizes as plain data: the same operations, with values of other bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.ir.graph import OperationCost, TrainingGraph


def resized(graph: TrainingGraph, values_bytes: Sequence[int], static_bytes: Mapping[str, int]) -> TrainingGraph:
    """Return a graph with values of these bytes, and this much resident around it."""
    values = tuple(
        value if value.size_bytes == size_bytes else replace(value, size_bytes=size_bytes)
        for value, size_bytes in zip(graph.values, values_bytes, strict=True)
    )
    return replace(graph, values=values, static_bytes=dict(static_bytes))


def scaled(
    costs: Sequence[OperationCost], before: TrainingGraph, now: TrainingGraph, workspaces_bytes: Sequence[int]
) -> tuple[OperationCost, ...]:
    """Return costs with times scaled by the bytes that operations touch, and these workspaces."""
    made = []
    for operation, cost, workspace_bytes in zip(before.operations, costs, workspaces_bytes, strict=True):
        touched = (*operation.inputs, *operation.outputs)
        old_bytes = sum(before.values[value].size_bytes for value in touched)
        scale = sum(now.values[value].size_bytes for value in touched) / old_bytes if old_bytes else 1.0
        made.append(replace(cost, seconds=cost.seconds * scale, workspace_bytes=workspace_bytes))
    return tuple(made)
