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

Where modules may send what they save to the host, three more say what that changes: ``unpack``, before
an operation of the backward, reads what comes back there; ``away`` stands for ``hold`` where a
checkpoint's inputs wait in the host's memory; ``back``, run again last, reads them, for they are there
until the region has run again. A value leaves when its module's call has ended and the program has let
go of it, so that a schedule's ``Offload`` says all about it.

What autograd alone still holds, for a backward that never comes, is a value of its own there: ``unread``
makes it, ``unheld`` reads it where autograd lets go. A checkpoint saves nothing of that, and runs nothing
again: in its region ``unread`` runs again right before ``unheld``, and then takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from planner.ir.graph import Operation, Phase, TrainingGraph
from planner.ir.schedule import Offload, Schedule

HOLD, SCRATCH, STOP, KEPT = "checkpoint.hold", "checkpoint.scratch", "checkpoint.stop", "checkpoint.kept"
AWAY, BACK, UNPACK = "checkpoint.away", "checkpoint.back", "checkpoint.unpack"
UNREAD, UNHELD = "checkpoint.unread", "checkpoint.unheld"
END = "end of the step"
BOOKKEEPING = (HOLD, SCRATCH, STOP, KEPT, AWAY, BACK, UNPACK, UNREAD, UNHELD)
"""Operations that run nothing: they say how long something lives."""
NOT_OF_THE_STEP = (KEPT, AWAY, BACK, UNPACK)
"""Those that are there for some ways only: a step is the same without them."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A value that a module's call sends to the host's memory; nothing outside that call saves it."""

    value: int
    numbers: tuple[int, ...]
    """Which of the tensors it is that the call saves; of those that its checkpoint is given, for a checkpoint."""
    leaves: int
    """Operation of the base order before which it is let go on the device."""
    returns: int
    """Operation of the base order before which it is there again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sends:
    """What a module's call could send to the host's memory."""

    saved: tuple[Sent, ...]
    """Of what it saves where it is not checkpointed."""
    given: tuple[Sent, ...]
    """Of what its checkpoint is given."""
    away: int
    back: int
    """Its operations of these names."""
    ended: int
    """Operation of the base order before which the call has ended."""
    begins: int
    """Operation of the backward before which the first is read of what the call saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A module's call that can be checkpointed."""

    module: str
    hold: int | None
    """Its operation of that name; None if it holds nothing but what its second run reads."""
    recompute: tuple[int, ...]
    """What is run again: ``scratch``, its operations up to the last one that saves anything, and ``stop``. Where the
    backward reads nothing of it, ``unread`` alone."""
    recompute_before: int
    """Operation right before which that happens, of the backward if it runs anything."""
    release_at: int
    """Operation of the backward before which its inputs are let go."""
    keepable: tuple[Keepable, ...] = ()
    kept: tuple[Keepable, ...] = ()
    """Operations of it that need not run again, and those that do not: their stand-ins are in ``recompute``."""
    sends: Sends | None = None
    sent: tuple[Sent, ...] = ()
    """What it could send to the host's memory, if anything may go there, and what it does send."""
    leaves_with: str = ""
    returns_with: str = ""
    """The modules at the end of whose calls that leaves, and with the first of whose saved tensors it returns; the
    module itself, if nothing is said."""


def nothing_unread(graph: TrainingGraph) -> TrainingGraph:
    """Return a graph in which nothing need be held that no backward reads, for bounds on what regions can do."""
    operations = (replace(o, inputs=()) if o.target == UNHELD else o for o in graph.operations)
    return replace(graph, operations=tuple(operations))


def schedule_of(graph: TrainingGraph, regions: Iterable[Region]) -> Schedule:
    """Return the schedule of a step in which these regions are checkpointed, or send what they save."""
    before: dict[int, list[int]] = {}
    chosen = list(regions)
    for region in chosen:
        if region.hold is not None:
            before.setdefault(region.release_at, []).append(region.hold)
    held = {index: len(again) for index, again in before.items()}
    for region in chosen:  # what is let go is gone before anything is run again
        before.setdefault(region.recompute_before, []).extend(region.recompute)
    schedule = Schedule.with_recomputations(graph, before)
    if not any(region.sent for region in chosen):
        return schedule
    begins = begins_of(graph, chosen)
    offloads = []
    ahead: dict[int, int] = {}
    for region in chosen:
        run_before = ahead.get(region.recompute_before, 0)
        ahead[region.recompute_before] = run_before + len(region.recompute)
        for sent in region.sent:
            own = run_before if region.recompute and sent.returns == region.recompute_before else 0
            returns = begins[sent.returns] + held.get(sent.returns, 0) + own
            offloads.append(Offload(sent.value, begins[sent.leaves], (returns,)))
    return Schedule(schedule.order, tuple(sorted(offloads, key=lambda offload: offload.value)))


def begins_of(graph: TrainingGraph, regions: Iterable[Region]) -> list[int]:
    """Return, for each operation, the position in the schedule where what comes before its run begins."""
    more = [0] * len(graph.operations)
    for region in regions:
        more[region.recompute_before] += len(region.recompute)
        if region.hold is not None:
            more[region.release_at] += 1
    return [index + before for index, before in enumerate(accumulate(more[:-1], initial=0))]


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
