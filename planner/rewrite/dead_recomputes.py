"""Reruns that are for nothing, since BatchNorm that is run again leaves running statistics alone.

A schedule runs again what an operation reads. BatchNorm's second run does not read the running statistics
that its first one did, so what only prepares those, as their conversion to another element type, is not needed.
If it ran all the same, it would read statistics of the first run, and hold them until then.
"""

from __future__ import annotations

from planner.capture.joint import is_batch_norm
from planner.capture.lowering import LoweredGraph
from planner.ir.schedule import Schedule


def dead_recomputes(lowered: LoweredGraph, schedule: Schedule) -> set[int]:
    """Return the positions of reruns of which nobody reads anything, once BatchNorm's reruns read no statistics.

    Whatever else a schedule runs for nothing stays: it is what was asked for, and counted.

    Notes
    -----
    O(runs x (inputs + outputs)).
    """
    return _unread(lowered, schedule, without_statistics=True) - _unread(lowered, schedule, without_statistics=False)


def _unread(lowered: LoweredGraph, schedule: Schedule, *, without_statistics: bool) -> set[int]:
    operations, values = lowered.graph.operations, lowered.graph.values
    first = {index: position for position, index in reversed(list(enumerate(schedule.order)))}
    returning = schedule.returning(lowered.graph)
    unread: set[int] = set()
    wanted: set[int] = set()
    for position, index in reversed(list(enumerate(schedule.order))):
        made = {value for value in operations[index].outputs if not values[value].retained}
        again = position > first[index]
        if again and wanted.isdisjoint(made):
            unread.add(position)
        else:
            wanted = wanted - made | _read(lowered, index, but_statistics=again and without_statistics)
        wanted.difference_update(returning.get(position, ()))
    return unread


def _read(lowered: LoweredGraph, index: int, *, but_statistics: bool) -> set[int]:
    node = lowered.operation_nodes[index]
    if node is None or not but_statistics or not is_batch_norm(node):
        return set(lowered.graph.operations[index].inputs)
    statistics = node.args[3:5]
    others = [argument for argument in node.all_input_nodes if argument not in statistics]
    return {value for argument in others for value in lowered.storage_of.get(argument, ())}
