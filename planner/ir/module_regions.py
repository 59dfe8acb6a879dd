"""Modules of a captured step that ``torch.utils.checkpoint`` could run again, as regions.

Of such a module only the boundary stays: what others read in the forward, and what cannot be
recomputed. The rest is dropped after the module and made again, all at once, when the backward
first needs any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from planner.ir.checkpoints import Region
from planner.ir.graph import Operation, Phase, TrainingGraph

Saved = Callable[[Operation], bool]
"""Whether what an operation makes is kept although its module runs again."""


def forward_of(graph: TrainingGraph, modules: Iterable[str]) -> tuple[int, ...]:
    """Return the operations of the forward that are in any of these modules."""
    inside = tuple(f"{module}." for module in modules)
    return tuple(
        index
        for index, operation in enumerate(graph.operations)
        if operation.phase is Phase.FORWARD and f"{operation.module}.".startswith(inside)
    )


def region_of(
    graph: TrainingGraph,
    module: str,
    inside: Collection[int],
    *,
    saved: Saved | None = None,
    to_the_end: bool = False,
) -> Region | None:
    """Return what checkpointing some operations of the forward does; None if nothing would run again.

    Where it goes on to the end, all of them run again and not only what the backward needs. O(operations + values).
    """
    operations, values, readers = graph.operations, graph.values, graph.readers
    inside = set(inside)
    held = {
        value
        for index in inside
        for value in operations[index].outputs
        if values[value].retained
        or not operations[index].recomputable
        or (saved is not None and saved(operations[index]))
        or any(operations[r].phase is not Phase.BACKWARD and r not in inside for r in readers[value])
    }
    needs: dict[int, int] = {}
    for index in inside:
        for value in operations[index].outputs:
            late = next((r for r in readers[value] if operations[r].phase is Phase.BACKWARD), None)
            if value not in held and late is not None:
                needs[value] = late
    if not needs:
        return None
    again: set[int] = set()
    needed = list(needs)
    while needed:  # from the boundary on
        maker = graph.producer[needed.pop()]
        if maker not in again:
            again.add(maker)
            inputs = operations[maker].inputs
            needed += (value for value in inputs if value not in held and graph.producer[value] in inside)
    if to_the_end:
        again |= {i for i in inside if operations[i].recomputable and not held.issuperset(operations[i].outputs)}
    before = min(needs.values())
    return Region(module=module, hold=None, recompute=tuple(sorted(again)), recompute_before=before, release_at=before)
