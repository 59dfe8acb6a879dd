"""Operations joined into one: those that write over an input with what made it, and those of one fused kernel.

Where nobody else reads what an operation reads last, and its result is as large, that result may take its place:
there is no moment at which both are there. Keeping the input in place of the result saves nothing, and whoever makes
one again makes the other. So the two are one operation of the step, and no solver, bound or simulator needs to know
more. What is given up are plans in which another input is made again between the two; so operations are joined only
where all of it together needs no more than the two do one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph
from planner.ir.schedule import Schedule

_NUMBER_BYTES = 512
"""What CUDA's allocator takes at least."""


@dataclass(frozen=True, kw_only=True)
class InPlace:
    """A step as plans have it, and the way back to the single operations that run."""

    graph: TrainingGraph
    parts: tuple[tuple[int, ...], ...]
    """For each operation, the single ones that it consists of, in the order in which they run."""
    values: tuple[int, ...]
    """For each value, which it is in the graph of single operations."""
    over: Mapping[int, int]
    """For each single operation that writes over an input, the value whose place its result takes."""
    single_costs: tuple[OperationCost, ...] = ()
    """What single operations cost."""

    def costs(self, single: Sequence[OperationCost]) -> tuple[OperationCost, ...]:
        """Return what operations cost, from the costs of single ones."""
        return tuple(
            replace(
                single[first],
                seconds=sum(single[index].seconds for index in (first, *rest)),
                cold_seconds=sum(single[index].cold_seconds for index in (first, *rest)),
                again_seconds=sum(single[index].again_seconds for index in (first, *rest)),
                workspace_bytes=max(single[index].workspace_bytes for index in (first, *rest)),
            )
            if rest
            else single[first]
            for first, *rest in self.parts
        )

    def carried_out(self, schedule: Schedule) -> Schedule:
        """Return a schedule of this graph in single operations."""
        starts = [0, *accumulate(len(self.parts[index]) for index in schedule.order)]
        return Schedule(
            tuple(part for index in schedule.order for part in self.parts[index]),
            tuple(
                replace(
                    offload,
                    value=self.values[offload.value],
                    leaves=starts[offload.leaves],
                    returns=tuple(starts[position] for position in offload.returns),
                )
                for offload in schedule.offloads
            ),
        )


def joined(graph: TrainingGraph, may_overwrite: Mapping[int, Sequence[int]], costs: Sequence[OperationCost]) -> InPlace:
    """Join operations to what made an input that they may write over, in O(operations + reads).

    For an operation ``may_overwrite`` names the inputs whose memory its one result can take: of the same layout, and
    of memory that the step made. It does so where it alone reads one, both are of one phase, and whatever must run
    before it does so before that one is made; it then runs right after that.
    """
    joining = _Joining(graph, costs)
    for index in sorted(may_overwrite):
        for value in may_overwrite[index]:
            if joining.can_follow(index, value):
                joining.join(index, value)
                break
    taken_by = {value: graph.operations[index].outputs[0] for index, value in joining.over.items()}
    found = written_anew(graph, joining.parts, taken_by)
    return replace(found, over=joining.over, single_costs=tuple(costs))


def written_anew(graph: TrainingGraph, parts: Sequence[Sequence[int]], taken_by: Mapping[int, int]) -> InPlace:
    """Return a graph of joined operations, in the order of ``parts``, of which some are empty.

    ``taken_by`` names for each value that is no longer there the one that stands for it.
    """
    return _Joined(graph, parts, taken_by).made()


def stretches(graph: TrainingGraph, written: Collection[int]) -> list[int]:
    """Return for each operation the stretch of the base order that it is in: others than those written end one."""
    return list(accumulate(index not in written for index in range(len(graph.operations))))


def fused(graph: TrainingGraph, written: Collection[int], stored: Collection[int] = ()) -> InPlace:
    """Join the operations that a compiler writes itself, in O(operations + reads).

    Of those that are ``written``, one whose readers are all one kernel's joins it if it is of the same phase, and
    nothing that is not written runs in between; not so what is ``stored``, whoever reads it.
    """
    operations, stretch = graph.operations, stretches(graph, written)
    kernel = list(range(len(operations)))
    for index in sorted({*written}.difference(stored), reverse=True):
        operation = operations[index]
        readers = {kernel[reader] for value in operation.outputs for reader in graph.readers[value]}
        if len(readers) != 1 or any(graph.values[value].retained for value in operation.outputs):
            continue
        (last,) = readers
        if last in written and operations[last].phase is operation.phase and stretch[last] == stretch[index]:
            kernel[index] = last
    parts: list[list[int]] = [[] for _ in operations]
    for index, last in enumerate(kernel):
        parts[last].append(index)
    inside = {
        value: operations[last].outputs[0]
        for index, last in enumerate(kernel)
        if index != last
        for value in operations[index].outputs
    }
    return written_anew(graph, parts, inside)


class _Joining:
    """Looks for what can be joined, and knows what each operation needs by then."""

    def __init__(self, graph: TrainingGraph, costs: Sequence[OperationCost]) -> None:
        self.graph, self.costs = graph, costs
        self.maker = list(graph.producer)
        self.runs_with = list(range(len(graph.operations)))
        self.parts = [[index] for index in range(len(graph.operations))]
        self.over: dict[int, int] = {}
        self.touched = [{*operation.inputs, *operation.outputs} for operation in graph.operations]
        self.workspaces = [cost.workspace_bytes for cost in costs]

    def can_follow(self, index: int, value: int) -> bool:
        graph, operation, first = self.graph, self.graph.operations[index], self.maker[value]
        values, made_by = graph.values, graph.operations[first]
        if graph.readers[value] != (index,) or values[value].retained or made_by.phase is not operation.phase:
            return False
        if values[value].size_bytes != values[operation.outputs[0]].size_bytes:
            return False
        others = [u for u in operation.inputs if u != value]
        if any(self.maker[u] >= first for u in others):
            return False
        if any(self.runs_with[earlier] > first for earlier in (graph.runs_after or {}).get(index, ())):
            return False
        # What the backward has made waits there anyway, and so may a number.
        made_back = {u for u in others if graph.operations[graph.producer[u]].phase is Phase.BACKWARD}
        waiting = made_back | {u for u in others if values[u].size_bytes <= _NUMBER_BYTES}
        before, workspace = self.touched[first] | waiting, self.workspaces[first]
        alone = self._size_bytes({*operation.inputs, *operation.outputs}) + self.costs[index].workspace_bytes
        together = self._size_bytes(before | set(others)) + max(workspace, self.costs[index].workspace_bytes)
        return together <= max(self._size_bytes(before) + workspace, alone)

    def join(self, index: int, value: int) -> None:
        first, operation = self.maker[value], self.graph.operations[index]
        (result,) = operation.outputs
        self.over[index], self.maker[result], self.runs_with[index] = value, first, first
        self.parts[first] += self.parts[index]
        self.parts[index] = []
        self.touched[first] = (self.touched[first] | {*operation.inputs, result}) - {value}
        self.workspaces[first] = max(self.workspaces[first], self.costs[index].workspace_bytes)

    def _size_bytes(self, values: Collection[int]) -> int:
        return sum(self.graph.values[u].size_bytes for u in values)


class _Joined:
    """Writes the graph anew, its values numbered without those whose place others take."""

    def __init__(self, graph: TrainingGraph, parts: Sequence[Sequence[int]], taken_by: Mapping[int, int]) -> None:
        self.graph, self.taken_by = graph, taken_by
        self.parts = tuple(tuple(each) for each in parts if each)
        self.values = tuple(u for u in range(len(graph.values)) if u not in self.taken_by)
        self.number = {u: number for number, u in enumerate(self.values)}

    def made(self) -> InPlace:
        graph = replace(
            self.graph,
            operations=tuple(map(self._operation, self.parts)),
            values=tuple(self.graph.values[u] for u in self.values),
            runs_after=self._runs_after(),
        )
        return InPlace(graph=graph, parts=self.parts, values=self.values, over={})

    def _runs_after(self) -> dict[int, tuple[int, ...]] | None:
        if self.graph.runs_after is None:
            return None
        joined = {part: index for index, parts in enumerate(self.parts) for part in parts}
        found: dict[int, set[int]] = {}
        for later, earlier in self.graph.runs_after.items():
            found.setdefault(joined[later], set()).update(joined[each] for each in earlier)
        return {later: tuple(sorted(earlier - {later})) for later, earlier in found.items() if earlier - {later}}

    def _operation(self, parts: Sequence[int]) -> Operation:
        first, *rest = (self.graph.operations[index] for index in parts)
        every = (first, *rest)
        outputs = tuple(dict.fromkeys(self._new(u) for operation in every for u in operation.outputs))
        if not rest:
            return replace(first, inputs=tuple(self.number[u] for u in first.inputs), outputs=outputs)
        return replace(
            first,
            inputs=tuple(self._read(every)),
            outputs=outputs,
            recomputable=all(operation.recomputable for operation in every),
            state_bytes=sum(operation.state_bytes for operation in every),
            flops=sum(operation.flops for operation in every),
            moved_bytes=sum(operation.moved_bytes for operation in every),
            again=all(operation.again for operation in every),
            then=tuple((operation.key, outputs.index(self._new(operation.outputs[0]))) for operation in rest),
        )

    def _new(self, value: int) -> int:
        while value in self.taken_by:
            value = self.taken_by[value]
        return self.number[value]

    def _read(self, every: Sequence[Operation]) -> Iterator[int]:
        made = {u for operation in every for u in operation.outputs}
        read = dict.fromkeys(u for operation in every for u in operation.inputs)
        return (self.number[u] for u in read if u not in made)
