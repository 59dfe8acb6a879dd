"""Regions that ``torch.utils.checkpoint`` can recompute, as decisions on a training graph.

In the graph of an eager step each region brings three operations of no cost along: ``hold``,
run again when the checkpoint lets go of its inputs and of the random state; ``scratch``, run again
before the region is, for the random state that is put back afterwards; ``stop``, run again after
its last operation, which reads what is alive there. An operation whose outputs a checkpoint can keep
has a fourth beside it, ``kept``, run again in its place, which reads what it reads and makes. With
them the lifetimes of a checkpointed step are those of a schedule, and ``simulate`` judges it like any
other. In a captured step a region is what runs again and no more (:func:`region_of`): of a module only the
boundary stays, what others read in the forward and what cannot be recomputed; the rest is dropped after
the module and recomputed, all at once, when the backward first needs any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from planner.ir.graph import Operation, Phase, TrainingGraph
from planner.ir.schedule import Schedule

HOLD, SCRATCH, STOP, KEPT = "checkpoint.hold", "checkpoint.scratch", "checkpoint.stop", "checkpoint.kept"
END = "end of the step"
BOOKKEEPING = (HOLD, SCRATCH, STOP, KEPT)
"""Operations that run nothing: they say how long something lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepable:
    """An operation of a region whose outputs its checkpoint can keep, so that it does not run again."""

    index: int
    stand_in: int
    """What runs again in its place."""
    operator: str
    """Its target."""
    occurrence: int
    """How often the region has called that operator before."""
    is_random: bool = False
    """Of operations that draw random numbers a checkpoint keeps all or none."""
    is_choice: bool = False
    """Whether it chooses, as a router does; it never runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A module's call that can be checkpointed."""

    module: str
    hold: int | None
    """Its operation of that name; None if it holds nothing but what its second run reads."""
    recompute: tuple[int, ...]
    """What is run again: ``scratch``, its operations up to the last one that saves anything, and ``stop``."""
    recompute_before: int
    """Operation of the backward right before which that happens."""
    release_at: int
    """Operation of the backward before which its inputs are let go."""
    keepable: tuple[Keepable, ...] = ()
    kept: tuple[Keepable, ...] = ()
    """Operations of it that need not run again, and those that do not: their stand-ins are in ``recompute``."""

    def keeping(self, kept: Iterable[Keepable]) -> Region:
        """Return the variant whose checkpoint keeps the outputs of some operations."""
        stand_ins = {one.index: one.stand_in for one in kept}
        again = tuple(stand_ins.get(index, index) for index in self.recompute)
        return replace(self, recompute=again, kept=tuple(sorted(kept, key=lambda one: one.index)))


def schedule_of(graph: TrainingGraph, regions: Iterable[Region]) -> Schedule:
    """Return the schedule of a step in which these regions are checkpointed."""
    before: dict[int, list[int]] = {}
    chosen = list(regions)
    for region in chosen:
        if region.hold is not None:
            before.setdefault(region.release_at, []).append(region.hold)
    for region in chosen:  # what is let go is gone before anything is run again
        before.setdefault(region.recompute_before, []).extend(region.recompute)
    return Schedule.with_recomputations(graph, before)


Saved = Callable[[Operation], bool]
"""Whether what an operation makes is kept although its module runs again."""


def region_of(
    graph: TrainingGraph, module: str, inside: Collection[int], *, saved: Saved | None = None
) -> Region | None:
    """Return what checkpointing some operations of the forward does; None if nothing would run again.

    O(operations + values).
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
    before = min(needs.values())
    return Region(module=module, hold=None, recompute=tuple(sorted(again)), recompute_before=before, release_at=before)
