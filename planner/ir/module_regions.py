"""Modules of a captured step that ``torch.utils.checkpoint`` could run again, as regions.

Of such a module only the boundary stays: what others read in the forward, and what cannot be
recomputed. The rest is dropped after the module and made again, all at once, when the backward
first needs any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

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


def module_region(
    graph: TrainingGraph, modules: Sequence[str], *, saved: Saved | None = None, to_the_end: bool = False
) -> Region | None:
    """Return what checkpointing a module, or several in a row as one, does.

    Parameters
    ----------
    modules : sequence of str
        Paths.
    saved : callable, optional
        What is kept inside.
    to_the_end : bool
        Whether all of it runs again, and not only what the backward needs.

    Returns
    -------
    Region or None
        ``None`` if nothing would run again.

    Notes
    -----
    O(operations + values).
    """
    return region_of(graph, modules[0], forward_of(graph, modules), saved=saved, to_the_end=to_the_end)


def region_of(
    graph: TrainingGraph,
    module: str,
    inside: Collection[int],
    *,
    saved: Saved | None = None,
    to_the_end: bool = False,
) -> Region | None:
    """Return what checkpointing some operations of the forward does; see :func:`module_region`."""
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
    again = _needed(graph, inside, held, needs)
    if to_the_end:
        again |= {i for i in inside if operations[i].recomputable and not _only_held(operations[i], held)}
    before = min(needs.values())
    return Region(module=module, hold=None, recompute=tuple(sorted(again)), recompute_before=before, release_at=before)


def _needed(graph: TrainingGraph, inside: Collection[int], held: Collection[int], needs: Iterable[int]) -> set[int]:
    """Return the operations that make what is needed, from the boundary on."""
    again: set[int] = set()
    pending = list(needs)
    while pending:
        producer = graph.producer[pending.pop()]
        if producer in again:
            continue
        again.add(producer)
        pending.extend(
            value
            for value in graph.operations[producer].inputs
            if value not in held and graph.producer[value] in inside
        )
    return again


def _only_held(operation: Operation, held: Collection[int]) -> bool:
    return all(value in held for value in operation.outputs)
