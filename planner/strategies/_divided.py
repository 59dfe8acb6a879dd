"""A step whose saved values are divided over devices: each holds a share, and gathers the whole where it is needed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from planner.errors import UsageError
from planner.ir.checkpoints import schedule_of
from planner.ir.graph import Operation, OperationCost, Value
from planner.ir.schedule import Schedule
from planner.strategies._step import StrategyStep

DEVICES = 8
"""Size of the group that values are divided over, where none is named: that of one server."""

GATHER = "gather of shares"
"""Target of the operation that makes a value from its shares; its inputs are the one that this device holds."""


def divided(step: StrategyStep, values: Collection[int], devices: int) -> StrategyStep:
    """Let each of some values be made from a share that is held beside it.

    Gathering takes no time here: what links devices is not known. Raises UsageError for a single device.
    """
    if devices < 2:
        raise UsageError("a value is divided over two devices at least")
    chosen = set(values)
    made: list[Value] = list(step.graph.values)
    operations: list[Operation] = []
    costs: list[OperationCost] = []
    for operation, cost in zip(step.graph.operations, step.costs, strict=True):
        moved = [value for value in operation.outputs if value in chosen]
        shares = []
        for value in moved:
            shares.append(len(made))
            whole = made[value]
            made.append(Value(name=f"share of {whole.name}", size_bytes=-(-whole.size_bytes // devices)))
        outputs = (*(value for value in operation.outputs if value not in chosen), *shares)
        held_bytes = sum(made[value].size_bytes for value in moved)
        operations.append(replace(operation, outputs=outputs))
        costs.append(replace(cost, workspace_bytes=cost.workspace_bytes + held_bytes))
        for value, share in zip(moved, shares, strict=True):
            name = f"gather of {made[value].name}"
            operations.append(
                replace(operation, name=name, key=name, target=GATHER, inputs=(share,), outputs=(value,), state_bytes=0,
                        recomputable=True, flops=0, moved_bytes=0)
            )  # fmt: skip
            costs.append(OperationCost(seconds=0.0))
    graph = replace(step.graph, operations=tuple(operations), values=tuple(made), runs_after=None)
    return replace(step, graph=graph, costs=costs)


def every_block_gathered(step: StrategyStep, _: int) -> Schedule:
    """Run every block again, after its inputs have been gathered."""
    gathers = {
        operation.outputs[0]: index
        for index, operation in enumerate(step.graph.operations)
        if operation.target == GATHER
    }
    found = []
    for region in step.regions(step.blocks, whole=True):
        first = tuple(gathers[value] for value in sorted(step.read_by(region) & gathers.keys()))
        found.append(replace(region, recompute=(*first, *region.recompute)))
    return schedule_of(step.graph, found)
