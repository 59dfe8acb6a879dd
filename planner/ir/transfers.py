"""When transfers to the host and back run, and how long computing waits for them.

Three things go on at once, each one after the other in itself: computing, sending, fetching. Sending
a value begins when the run that first makes it has ended and all sent before it is through. Where it
leaves, computing waits until it is sent. Where it returns, fetching it begins as soon as computing
has come there and all fetched before it is through, of what returns together first what is read first;
the first run that reads it waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import ScheduleError
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import Host
from planner.ir.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimes:
    """When everything happens, in seconds from the begin of the step.

    Parameters
    ----------
    starts : tuple of float
        When each run of the order begins.
    sent : dict of int to float
        When each offloaded value is through to the host.
    stall_seconds : float
        Time that computing waits.
    transfer_seconds : float
        Time of all transfers.
    """

    starts: tuple[float, ...]
    sent: dict[int, float]
    stall_seconds: float
    transfer_seconds: float


def transfer_times(
    graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule, host: Host | None
) -> TransferTimes:
    """Follow computing, sending and fetching through a step.

    Raises
    ------
    ScheduleError
        If there is no host, or a value is fetched that no run reads before it is made or fetched again.

    Notes
    -----
    O(runs x inputs).
    """
    if host is None:
        raise ScheduleError("the schedule offloads values, and there is no host to take them")
    operations, values = graph.operations, graph.values
    seconds = {offload.value: host.seconds(offload.host_bytes(values[offload.value])) for offload in schedule.offloads}
    leaving: dict[int, list[int]] = {}
    for offload in schedule.offloads:
        leaving.setdefault(offload.leaves, []).append(offload.value)
    returning = schedule.returning(graph)

    now = sending_until = fetching_until = stall_seconds = transfer_seconds = 0.0
    starts: list[float] = []
    sent: dict[int, float] = {}
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
        starts.append(now)
        now += costs[index].seconds
        for value in operations[index].outputs:
            if value in arrives:
                raise ScheduleError(f"{values[value].name} is fetched, and made again before it is read")
            if value in seconds and value not in sent:
                sending_until = max(sending_until, now) + seconds[value]
                transfer_seconds += seconds[value]
                sent[value] = sending_until
    if arrives:
        raise ScheduleError(f"{values[next(iter(arrives))].name} is fetched and not read")
    return TransferTimes(
        starts=tuple(starts), sent=sent, stall_seconds=stall_seconds, transfer_seconds=transfer_seconds
    )
