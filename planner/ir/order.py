"""The order in which a step's operations first run: it may be another than that in which they were captured.

Every order in which each operation comes after what it needs gives the same bits: sums keep their operands, and what
draws random numbers, writes into memory or talks to other processes keeps its place among its like. Bytes are another
matter, so an order is part of a plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.errors import PlanMismatchError, ScheduleError
from planner.ir.graph import TrainingGraph
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule

END = ""
"""Stands for the end of the step where an order names the operation before which others run."""


def reordered(problem: Problem, order: Sequence[int]) -> Problem:
    """Return a problem whose operations are in another order; a ScheduleError says what forbids that."""
    costs = tuple(problem.costs[index] for index in order)
    return replace(problem, graph=reordered_graph(problem.graph, order), costs=costs)


def reordered_graph(graph: TrainingGraph, order: Sequence[int]) -> TrainingGraph:
    """Return a graph whose operations are in another order, likewise."""
    check_order(graph, order)
    place = {index: number for number, index in enumerate(order)}
    after = None
    if graph.runs_after is not None:
        after = {place[index]: tuple(sorted(place[each] for each in e)) for index, e in graph.runs_after.items()}
    return replace(graph, operations=tuple(graph.operations[index] for index in order), runs_after=after)


def check_order(graph: TrainingGraph, order: Sequence[int]) -> None:
    """Raise a ScheduleError if the operations of a step cannot run in an order, or would give other bits in it."""
    captured = range(len(graph.operations))
    if list(order) == list(captured):
        return
    if graph.runs_after is None:
        raise ScheduleError("the operations of this step cannot run in another order")
    if sorted(order) != list(captured):
        raise ScheduleError("an order names each operation once")
    place = {index: number for number, index in enumerate(order)}
    for index, earlier in enumerate(needed(graph)):
        for before in earlier:
            if place[before] > place[index]:
                first, second = graph.operations[before].name, graph.operations[index].name
                raise ScheduleError(f"{second} runs before {first}, which must come first")


def needed(graph: TrainingGraph) -> list[set[int]]:
    """Return, for each operation, those that must run before it.

    They make what it reads, or are named by ``graph.runs_after``; the loss comes between forward and backward.
    """
    turn = graph.loss_index
    found = [{graph.producer[u] for u in operation.inputs} for operation in graph.operations]
    for index, earlier in (graph.runs_after or {}).items():
        found[index].update(earlier)
    if turn < len(found):
        found[turn].update(range(turn))
        for later in range(turn + 1, len(found)):
            found[later].add(turn)
    return found


def order_of(schedule: Schedule) -> tuple[int, ...]:
    """Return the order in which operations first run under a schedule."""
    return tuple(dict.fromkeys(schedule.order))


def renumbered(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Return a schedule of a reordered step as one of the step as it was captured: positions stay."""
    return replace(schedule, order=tuple(order[index] for index in schedule.order))


def in_own_order(problem: Problem, schedule: Schedule) -> tuple[Problem, Schedule]:
    """Return a problem in the order in which a schedule first runs its operations, and the schedule as one of that."""
    order = order_of(schedule)
    if list(order) == list(range(len(problem.graph.operations))):
        return problem, schedule
    place = {index: number for number, index in enumerate(order)}
    return reordered(problem, order), replace(schedule, order=tuple(place[index] for index in schedule.order))


def moved(graph: TrainingGraph, order: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Write out an order: for an operation that stays, the keys of those that run right before it, in this order.

    As few as possible move; whichever operations are one with others, each is named. O(operations x log operations).
    """
    stays = _longest_rising(order)
    found: dict[str, tuple[str, ...]] = {}
    waiting: list[str] = []
    for index in order:
        if index not in stays:
            waiting.extend(graph.operations[index].keys)
        elif waiting:
            found[graph.operations[index].key] = tuple(waiting)
            waiting = []
    return {**found, END: tuple(waiting)} if waiting else found


def order_with(graph: TrainingGraph, moves: Mapping[str, Sequence[str]]) -> tuple[int, ...]:
    """Return the order that moves write out; a PlanMismatchError says that it is none of this step."""
    if not moves:
        return tuple(range(len(graph.operations)))
    index_of = {key: index for index, operation in enumerate(graph.operations) for key in operation.keys}
    own = {operation.key for operation in graph.operations}
    named = [key for before, keys in moves.items() for key in ((before, *keys) if before != END else keys)]
    if missing := [key for key in named if key not in index_of]:
        raise PlanMismatchError(
            f"the plan orders {len(missing)} operations that {graph.name or 'this model'} does not have "
            f"({', '.join(missing[:3])}); make a new plan for this model and these shapes"
        )
    going = {index_of[key] for keys in moves.values() for key in keys if key in own}
    coming: dict[int, list[int]] = {}
    for before, keys in moves.items():
        place = len(graph.operations) if before == END else index_of[before]
        coming.setdefault(place, []).extend(index_of[key] for key in keys if key in own)
    order: list[int] = []
    for index in range(len(graph.operations) + 1):
        order += coming.get(index, ())
        if index < len(graph.operations) and index not in going:
            order.append(index)
    try:
        check_order(graph, order)
    except ScheduleError as error:
        raise PlanMismatchError(
            f"the plan's order cannot be that of {graph.name or 'this model'}: {error}; make a new plan for this model "
            "and these shapes"
        ) from error
    return tuple(order)


def _longest_rising(order: Sequence[int]) -> set[int]:
    """Return the members of a longest rising subsequence."""
    ends: list[int] = []
    before: dict[int, int | None] = {}
    for index in order:
        at = bisect_left(ends, index)
        before[index] = ends[at - 1] if at else None
        ends[at:] = [index, *ends[at + 1 :]]
    found: set[int] = set()
    member = ends[-1] if ends else None
    while member is not None:
        found.add(member)
        member = before[member]
    return found
