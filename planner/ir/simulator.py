"""The exact simulator: peak and time of a schedule, and the only judge of them.

It follows the generated code. While an operation runs, its inputs, its outputs, its workspace and
every copy that a later run reads are live; a copy is freed right after the run that made or last
read it; retained values are held to the end, in their first copy. An offloaded value is not on the
device between the positions where the schedule frees and fetches it.

With a host there are three queues that run side by side: computing, sending, fetching. Sending a value
begins when the run that first makes it and all earlier sends have ended. At the position where it
leaves, computing waits until it is sent. At the position where it returns, fetching begins once
computing has reached it and all earlier fetches have ended; of values that return together, the one
that is read first is fetched first. The first run that reads a value waits for its fetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import NamedTuple

from planner.errors import ScheduleError
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import Host
from planner.ir.schedule import Schedule


def _transfers(
    graph: TrainingGraph, run_seconds: Sequence[float], schedule: Schedule, host: Host | None
) -> tuple[float, float]:
    """Return the seconds that computing waits for transfers, and the seconds of all transfers.

    ScheduleError if there is no host, or a fetched copy is never read. O(runs x inputs).
    """
    if host is None:
        raise ScheduleError("the schedule offloads values, and there is no host to take them")
    operations, values = graph.operations, graph.values
    seconds = {offload.value: host.seconds(values[offload.value].size_bytes) for offload in schedule.offloads}
    leaving, returning = _moves(graph, schedule)

    now = sending_until = fetching_until = stall_seconds = transfer_seconds = 0.0
    sent: dict[int, float] = {}
    """When each offloaded value has arrived on the host."""
    arrives: dict[int, float] = {}

    def wait(until: float) -> None:
        nonlocal now, stall_seconds
        if until > now:
            stall_seconds += until - now
            now = until

    for position, index in enumerate(schedule.order):
        for value in leaving.get(position, ()):
            wait(sent[value])
        for value in returning.get(position, ()):
            if value in arrives:
                raise ScheduleError(f"{values[value].name} is fetched twice for one use")
            fetching_until = max(fetching_until, now) + seconds[value]
            transfer_seconds += seconds[value]
            arrives[value] = fetching_until
        for value in operations[index].inputs:
            if value in arrives:
                wait(arrives.pop(value))
        now += run_seconds[position]
        for value in operations[index].outputs:
            if value in arrives:
                raise ScheduleError(f"{values[value].name} is fetched, and recomputed before it is read")
            if value in seconds and value not in sent:
                sending_until = max(sending_until, now) + seconds[value]
                transfer_seconds += seconds[value]
                sent[value] = sending_until
    if arrives:
        raise ScheduleError(f"{values[next(iter(arrives))].name} is fetched and not read")
    return stall_seconds, transfer_seconds


_AWAY = -2
"""Marks a value whose current copy is on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The simulated peak and times of a schedule."""

    peak_bytes: int
    """Peak above the memory that is resident before the step."""
    peak_position: int
    """First position of the peak in the schedule's order."""
    seconds: float
    """Time of all runs, and of waiting for transfers."""
    recompute_seconds: float
    """Time of the runs after each operation's first."""
    timeline_bytes: tuple[int, ...]
    """Live bytes during each run of the order."""
    stall_seconds: float = 0.0
    """Time that runs wait for transfers, that is, the part not hidden behind computing."""
    transfer_seconds: float = 0.0
    """Time of all transfers, hidden or not."""
    host_bytes: int = 0
    """Bytes of all offloaded values: each has its own place in host memory for the whole step."""

    @property
    def added_seconds(self) -> float:
        """Time added to the step: recompute, and waiting for transfers."""
        return self.recompute_seconds + self.stall_seconds


class Copy(NamedTuple):
    """One copy of a value: made by the run at ``born``, last needed by the run at ``died``."""

    value: int
    born: int
    died: int


class FetchedCopy(Copy):
    """A copy that is fetched from the host, right before the run at ``born``."""


def lifetimes(graph: TrainingGraph, schedule: Schedule) -> list[Copy]:
    """Return every copy of every value that a schedule makes, with its lifetime in positions.

    ScheduleError if an operation reads a value that was not made or is on the host, never runs, or runs twice and is
    not recomputable. O(runs x (inputs + outputs)).
    """
    order, operations, values = schedule.order, graph.operations, graph.values
    end = len(order) - 1
    current: list[int] = [-1] * len(values)
    ran = [False] * len(operations)
    value_of: list[int] = []
    born: list[int] = []
    died: list[int] = []
    fetched: set[int] = set()
    leaving, returning = _moves(graph, schedule)
    moving = leaving.keys() | returning.keys()
    for position, index in enumerate(order):
        operation = operations[index]
        if moving and position in moving:
            for value in leaving.get(position, ()):
                if current[value] < 0:
                    raise ScheduleError(f"{values[value].name} leaves before it is made")
                copy = value_of.index(value)
                if current[value] != copy:
                    raise ScheduleError(f"{values[value].name} is recomputed before it leaves")
                died[copy] = max(died[copy], position - 1)
                current[value] = _AWAY
            for value in returning.get(position, ()):
                fetched.add(len(born))
                current[value] = len(born)
                value_of.append(value)
                born.append(position)
                died.append(position)
        if ran[index] and not operation.recomputable:
            raise ScheduleError(f"{operation.name} is not recomputable and runs twice")
        for value in operation.inputs:
            copy = current[value]
            if copy < 0:
                gone = "is away" if copy == _AWAY else "has not been made"
                raise ScheduleError(f"{operation.name} reads {values[value].name}, which {gone}")
            if died[copy] < position:
                died[copy] = position
        for value in operation.outputs:
            first = current[value] < 0
            retained = values[value].retained
            if first or not retained:
                current[value] = len(born)
            value_of.append(value)
            born.append(position)
            died.append(end if retained and first else position)
        ran[index] = True
    if not all(ran):
        raise ScheduleError(f"{operations[ran.index(False)].name} never runs")
    copies = [Copy(v, b, d) for v, b, d in zip(value_of, born, died, strict=True)]
    for copy in fetched:
        copies[copy] = FetchedCopy(value_of[copy], born[copy], died[copy])
    return copies


def _moves(graph: TrainingGraph, schedule: Schedule) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the values that leave, and those that return, by position."""
    leaving: dict[int, list[int]] = {}
    moved: set[int] = set()
    for offload in schedule.offloads:
        name = graph.values[offload.value].name
        places = (offload.leaves, *offload.returns)
        if graph.values[offload.value].retained or offload.value in moved:
            raise ScheduleError(f"{name} is offloaded, and is {'twice' if offload.value in moved else 'retained'}")
        if not offload.returns or list(places[1:]) != sorted(set(places[1:])) or places[0] > places[1]:
            raise ScheduleError(f"{name} leaves at {places[0]} and returns at {list(places[1:])}, out of order")
        if places[-1] >= len(schedule.order):
            raise ScheduleError(f"{name} returns after the end of the step")
        moved.add(offload.value)
        leaving.setdefault(offload.leaves, []).append(offload.value)
    return leaving, schedule.returning(graph)


def seconds_of_runs(costs: Sequence[OperationCost], order: Sequence[int]) -> list[float]:
    """Return how long each run of an order takes: first runs take longer."""
    first = dict(zip(reversed(order), range(len(order) - 1, -1, -1), strict=True))
    return [
        costs[index].first_seconds if first[index] == position else costs[index].seconds
        for position, index in enumerate(order)
    ]


def simulate(
    graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule, host: Host | None = None
) -> Evaluation:
    """Simulate a schedule, with one cost for each operation; ScheduleError if it cannot be run.

    A schedule with offloaded values needs a host.
    """
    order, operations, values = schedule.order, graph.operations, graph.values
    change = [0] * (len(order) + 1)
    copies = lifetimes(graph, schedule)
    for copy in copies:
        size = values[copy.value].size_bytes
        change[copy.born] += size
        change[copy.died + 1] -= size

    first = schedule.first_runs()
    run_seconds = seconds_of_runs(costs, order)
    for index, last in {index: position for position, index in enumerate(order)}.items():
        if last > first[index]:
            change[first[index]] += operations[index].state_bytes
            change[last + 1] -= operations[index].state_bytes

    timeline = tuple(map(add, accumulate(change), (costs[index].workspace_bytes for index in order)))
    peak = max(timeline, default=0)
    stall_seconds = transfer_seconds = 0.0
    if schedule.offloads:
        stall_seconds, transfer_seconds = _transfers(graph, run_seconds, schedule, host)
    return Evaluation(
        peak_bytes=peak,
        peak_position=timeline.index(peak) if timeline else 0,
        seconds=sum(run_seconds) + stall_seconds,
        recompute_seconds=sum(run_seconds[position] for position, index in enumerate(order) if first[index] < position),
        timeline_bytes=timeline,
        stall_seconds=stall_seconds,
        transfer_seconds=transfer_seconds,
        host_bytes=sum(values[offload.value].size_bytes for offload in schedule.offloads),
    )
