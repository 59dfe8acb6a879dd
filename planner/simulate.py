"""The exact simulator: the only judge of what a schedule costs.

It follows what the generated code does. While an operation runs, its inputs, its outputs, its
workspace and every copy that a later run reads are there; a copy nobody reads again goes right
after the run that made or last read it; retained values stay to the end, in their first copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import ScheduleError
from planner.graph import OperationCost, TrainingGraph
from planner.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the simulator found.

    Parameters
    ----------
    peak_bytes : int
        Most bytes at any moment, above what is resident before the step.
    peak_position : int
        Position in the schedule's order where the peak first stands.
    seconds : float
        Time of all runs.
    recompute_seconds : float
        Time of the runs after each operation's first.
    timeline_bytes : tuple of int
        Bytes while each run of the order is under way.
    """

    peak_bytes: int
    peak_position: int
    seconds: float
    recompute_seconds: float
    timeline_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a value: made by the run at ``born``, last needed by the run at ``died``."""

    value: int
    born: int
    died: int


def lifetimes(graph: TrainingGraph, schedule: Schedule) -> list[Copy]:
    """Give every copy of every value that a schedule makes, with its lifetime in positions.

    Raises
    ------
    ScheduleError
        If an operation reads a value that has not been made, if one never runs, or if one that
        is not recomputable runs twice.

    Notes
    -----
    O(runs x (inputs + outputs)).
    """
    order, operations, values = schedule.order, graph.operations, graph.values
    end = len(order) - 1
    current: list[int] = [-1] * len(values)
    ran = [False] * len(operations)
    value_of: list[int] = []
    born: list[int] = []
    died: list[int] = []
    for position, index in enumerate(order):
        operation = operations[index]
        if ran[index] and not operation.recomputable:
            raise ScheduleError(f"{operation.name} is not recomputable and runs twice")
        for value in operation.inputs:
            copy = current[value]
            if copy < 0:
                raise ScheduleError(f"{operation.name} reads {values[value].name}, which has not been made")
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
    return [Copy(v, b, d) for v, b, d in zip(value_of, born, died, strict=True)]


def simulate(graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule) -> Evaluation:
    """Run a schedule on paper.

    Parameters
    ----------
    graph : TrainingGraph
    costs : sequence of OperationCost
        One for each operation.
    schedule : Schedule

    Returns
    -------
    Evaluation

    Raises
    ------
    ScheduleError
        If the schedule cannot be run.
    """
    order, operations, values = schedule.order, graph.operations, graph.values
    change = [0] * (len(order) + 1)
    for copy in lifetimes(graph, schedule):
        size = values[copy.value].size_bytes
        change[copy.born] += size
        change[copy.died + 1] -= size

    first: dict[int, int] = {}
    last: dict[int, int] = {}
    seconds = recompute_seconds = 0.0
    for position, index in enumerate(order):
        if index in first:
            last[index] = position
            recompute_seconds += costs[index].seconds
        else:
            first[index] = position
        seconds += costs[index].seconds
    for index, position in last.items():
        change[first[index]] += operations[index].state_bytes
        change[position + 1] -= operations[index].state_bytes

    timeline: list[int] = []
    live = 0
    for position, index in enumerate(order):
        live += change[position]
        timeline.append(live + costs[index].workspace_bytes)
    peak = max(timeline, default=0)
    return Evaluation(
        peak_bytes=peak,
        peak_position=timeline.index(peak) if timeline else 0,
        seconds=seconds,
        recompute_seconds=recompute_seconds,
        timeline_bytes=tuple(timeline),
    )
