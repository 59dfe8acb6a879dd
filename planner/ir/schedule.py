"""A schedule: the order in which operations run, recomputed ones more than once.

The order alone fixes all lifetimes, because a value is freed right after the last run that
reads it, as boxed generated code does. Running an operation again makes a new copy of its
outputs; runs after it read the new copy, so the old one dies at its last use before.

A value may also be offloaded: sent to the host's memory when it is first made, freed on the device, and
fetched before it is read again. The positions at which it leaves and returns are part of the schedule, so
memory does not depend on how long a transfer takes; only waiting times do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from planner.errors import ScheduleError
from planner.ir.graph import TrainingGraph


@dataclass(frozen=True, slots=True)
class Offload:
    """A value that waits in the host's memory between two uses."""

    value: int
    """The value, sent right after the run that first makes it."""
    leaves: int
    """Position in the order: its first copy is freed right before that run, once sending has ended."""
    returns: tuple[int, ...]
    """Positions: right before each of these runs a new copy is allocated and fetching begins. The first run that reads
    the copy waits until it is fetched."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operation indices in the order of their runs, and the offloaded values.

    First runs are in base order, unless the schedule was found in another order: see :mod:`planner.ir.order`.
    """

    order: tuple[int, ...]
    offloads: tuple[Offload, ...] = ()

    @classmethod
    def keep_all(cls, graph: TrainingGraph) -> Schedule:
        """Return the schedule that runs every operation once."""
        return cls(tuple(range(len(graph.operations))))

    @classmethod
    def as_written(cls, graph: TrainingGraph) -> Schedule:
        """Return the schedule of the model's own checkpointing: what its backward recomputes is recomputed."""
        again = [operation for operation in graph.operations if operation.again and operation.recomputable]
        dropped = [value for operation in again for value in operation.outputs]
        return recompute_lazily(graph, {graph.loss_index: dropped}) if dropped else cls.keep_all(graph)

    @classmethod
    def with_recomputations(cls, graph: TrainingGraph, before: Mapping[int, Sequence[int]]) -> Schedule:
        """Return the schedule that recomputes, right ``before`` operations of the base order, what is named there."""
        order: list[int] = []
        for index in range(len(graph.operations)):
            order.extend(before.get(index, ()))
            order.append(index)
        return cls(tuple(order))

    def first_runs(self) -> dict[int, int]:
        """Return the position at which each operation first runs."""
        return {index: position for position, index in reversed(tuple(enumerate(self.order)))}

    def returning(self, graph: TrainingGraph) -> dict[int, list[int]]:
        """Return the values that are fetched at each position, in the order of their first reads."""
        together: dict[int, list[int]] = {}
        for offload in self.offloads:
            for position in offload.returns:
                together.setdefault(position, []).append(offload.value)

        def first_read(value: int, position: int) -> int:
            reads = (at for at in range(position, len(self.order)) if value in graph.operations[self.order[at]].inputs)
            return next(reads, len(self.order))

        for position, values in together.items():
            if len(values) > 1:
                values.sort(key=lambda value: (first_read(value, position), value))
        return together

    def recomputations(self) -> dict[int, tuple[int, ...]]:
        """Return what is recomputed right before each operation's first run.

        ScheduleError if first runs are not in base order, or something is recomputed after the last operation.
        """
        before: dict[int, tuple[int, ...]] = {}
        pending: list[int] = []
        expected = 0
        for index in self.order:
            if index == expected:
                if pending:
                    before[index] = tuple(pending)
                    pending = []
                expected += 1
            elif index < expected:
                pending.append(index)
            else:
                raise ScheduleError(f"operation {index} runs before operation {expected}, against the base order")
        if pending:
            raise ScheduleError(f"operations {pending} are recomputed after the end of the step")
        return before


def recompute_lazily(graph: TrainingGraph, dropped: Mapping[int, Collection[int]]) -> Schedule:
    """Recompute each dropped value right before the first run that reads it. O(runs x inputs).

    ``dropped`` maps a position of the base order to the values that are freed when it begins; values that its operation
    makes or reads are freed after it. Retained values are never dropped. A recomputed copy is held until it is dropped
    again or unused. ScheduleError if a value would have to be recomputed by an operation that is not recomputable.
    """
    operations, values, producer = graph.operations, graph.values, graph.producer
    held = [False] * len(values)
    order: list[int] = []

    def run(index: int) -> None:
        stack = [index]
        while stack:
            top = stack[-1]
            missing = [producer[v] for v in operations[top].inputs if not held[v]]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if top != index and all(held[v] for v in operations[top].outputs):
                continue
            if top != index and not operations[top].recomputable:
                raise ScheduleError(f"{operations[top].name} must be recomputed, but is not recomputable")
            order.append(top)
            for value in operations[top].outputs:
                held[value] = True

    for index in range(len(operations)):
        leaving = {value for value in dropped.get(index, ()) if not values[value].retained}
        touched = {*operations[index].inputs, *operations[index].outputs}
        for value in leaving - touched:
            held[value] = False
        run(index)
        for value in leaving & touched:
            held[value] = False
    return Schedule(tuple(order))


def recompute_in_regions(graph: TrainingGraph, schedule: Schedule) -> Schedule:
    """Defer recomputations that run outside their region to the next run of that region.

    What would come after its region's last operation is of no use there, and is left out. Operations
    without a region stay where they are. O(operations + runs).
    """
    before: dict[int, list[int]] = {}
    waiting: dict[str, list[int]] = {}
    recomputations = schedule.recomputations()
    for index, operation in enumerate(graph.operations):
        due = waiting.pop(operation.region, []) if operation.region else []
        for again in recomputations.get(index, ()):
            region = graph.operations[again].region
            place = due if region in ("", operation.region) else waiting.setdefault(region, [])
            if again not in place:
                place.append(again)
        if due:
            before[index] = due
    return Schedule.with_recomputations(graph, before)


def between_units(graph: TrainingGraph, order: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return for each unit, by its region, the positions at which its forward has ended and its backward begins.

    In between none of its graphs runs, so nothing that it holds can leave or return there.
    """
    ended: dict[str, int] = {}
    begun: dict[str, int] = {}
    is_forward = True
    for position, index in enumerate(order):
        region = graph.operations[index].region
        is_forward = is_forward and index < graph.loss_index
        if region and is_forward:
            ended[region] = position + 1
        elif region:
            begun.setdefault(region, position)
    return {region: (ended[region], position) for region, position in begun.items() if region in ended}
