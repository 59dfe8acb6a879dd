"""The offloaded values of a plan, named by keys of operations so that they survive another capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from planner.errors import PlanMismatchError
from planner.ir.graph import TrainingGraph
from planner.ir.problem import Problem
from planner.ir.schedule import Offload, Schedule
from planner.ir.simulator import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A position in a schedule: so many runs before the first run of an operation.

    Runs are counted, and values named, as if no operations were one: which are may be otherwise elsewhere.
    """

    before: str
    runs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedValue:
    """An offloaded value: an output of the operation with this key.

    Right before one run it is freed on the device, right before each of others it is taken there again.
    """

    operation: str
    output: int
    size_bytes: int
    leaves: Place
    returns: tuple[Place, ...]

    def named(self, name: Callable[[str], str]) -> OffloadedValue:
        """Return the value with other names of operations."""
        leaves, *returns = (replace(at, before=name(at.before)) for at in (self.leaves, *self.returns))
        return replace(self, operation=name(self.operation), leaves=leaves, returns=tuple(returns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloading:
    """What a plan offloads, what that takes of the host's memory, and what it may take.

    Times stand on a rate of the link each way: that of all transfers, and the stall that does not hide behind
    computing.
    """

    values: tuple[OffloadedValue, ...]
    host_bytes: int
    host_budget_bytes: int
    bytes_per_second: float
    transfer_seconds: float
    stall_seconds: float
    alone_seconds: float | None = field(default=None, metadata={"left_out": True})
    """What the cheapest plan without offload adds to the step; None if none was found, or none sought."""


def offloading_of(
    problem: Problem, schedule: Schedule, evaluation: Evaluation, alone_seconds: float | None = None
) -> Offloading | None:
    """Return the offloads of a schedule; None if nothing could be offloaded."""
    host, graph = problem.host, problem.graph
    if host is None:
        return None
    places: list[Place] = []
    starts = _starts(graph, schedule)
    for index, position in sorted(schedule.first_runs().items()):
        key = graph.operations[index].key
        until = starts[position]
        places += [Place(before=key, runs=until - starts[early]) for early in range(len(places), position + 1)]
    values = []
    for offload in schedule.offloads:
        operation = graph.operations[graph.producer[offload.value]]
        key, output = operation.made_by(operation.outputs.index(offload.value))
        values.append(
            OffloadedValue(
                operation=key,
                output=output,
                size_bytes=graph.values[offload.value].size_bytes,
                leaves=places[offload.leaves],
                returns=tuple(places[position] for position in offload.returns),
            )
        )
    return Offloading(
        values=tuple(values),
        host_bytes=evaluation.host_bytes,
        host_budget_bytes=host.budget_bytes,
        bytes_per_second=host.bytes_per_second,
        transfer_seconds=evaluation.transfer_seconds,
        stall_seconds=evaluation.stall_seconds,
        alone_seconds=alone_seconds,
    )


def with_offloads(
    graph: TrainingGraph,
    schedule: Schedule,
    offloading: Offloading | None,
    named: Callable[[str], str] = lambda key: key,
) -> Schedule:
    """Add what a plan offloads to a schedule; a PlanMismatchError says that the graph lacks it, or a position.

    Of a graph that is part of the planned step, ``named`` gives the keys that its operations have there.
    """
    if offloading is None or not offloading.values:
        return schedule
    index_of = {named(key): index for index, operation in enumerate(graph.operations) for key in operation.keys}
    over = {named(key): output for operation in graph.operations for key, output in operation.then}
    first = schedule.first_runs()
    starts = _starts(graph, schedule)
    position_at = {start: position for position, start in enumerate(starts)}

    def position_of(place: Place) -> int:
        return position_at[starts[first[index_of[place.before]]] - place.runs]

    offloads = []
    for value in offloading.values:
        try:
            output = over.get(value.operation, value.output)
            made = graph.operations[index_of[value.operation]].outputs[output]
            offloads.append(Offload(made, position_of(value.leaves), tuple(map(position_of, value.returns))))
        except (KeyError, IndexError) as error:
            raise PlanMismatchError(
                f"the plan offloads output {value.output} of {value.operation}, and {graph.name or 'this model'} lacks "
                "it, or the operation before which it leaves or returns; make a new plan for this model and these "
                "shapes"
            ) from error
    return Schedule(schedule.order, tuple(sorted(offloads, key=lambda offload: offload.value)))


def _starts(graph: TrainingGraph, schedule: Schedule) -> list[int]:
    """Return how many single runs come before each run of a schedule."""
    return [0, *accumulate(len(graph.operations[index].keys) for index in schedule.order)]
