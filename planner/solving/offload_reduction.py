"""Reduce offload to recompute: fetching a value counts as recomputing it at next to no cost.

A value that may be offloaded is taken as made by an operation of its own, right after the one that
really makes it, which reads nothing that takes memory: making it again stands for fetching it. What
a solver then runs again of these operations are offloads, what else it runs again is recompute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from planner.ir.graph import Operation, OperationCost, TrainingGraph, Value
from planner.ir.problem import Problem
from planner.ir.schedule import Offload, Schedule, recompute_in_regions


class Reduction:
    """A ``real`` problem, and the operations and values of one that stands for it."""

    def __init__(self, problem: Problem) -> None:
        self.real = problem
        self.values = list(problem.graph.values)
        self.operations: list[Operation] = []
        self.costs: list[OperationCost] = []
        self.stands_for: list[int] = []
        """For each of the operations the real one, or -1 less the value that it fetches."""

    def add_value(self, name: str, size_bytes: int) -> int:
        """Add a value, and return its number."""
        self.values.append(Value(name=name, size_bytes=size_bytes))
        return len(self.values) - 1

    def add_ticket(self, value: int) -> int:
        """Add what a fetch of a value reads, which takes no memory, and return its number."""
        return self.add_value(f"ticket of {self.values[value].name}", 0)

    def add(self, operation: Operation, cost: OperationCost, stands_for: int) -> None:
        """Add an operation that stands for a real one."""
        self.operations.append(operation)
        self.costs.append(cost)
        self.stands_for.append(stands_for)

    def add_fetch(self, value: int, ticket: int, made: int, seconds: float, **facts: Any) -> None:
        """Add an operation that stands for fetching a value."""
        name = f"fetch of {self.values[value].name}"
        fetch = Operation(name=name, key=name, target="", inputs=(ticket,), outputs=(made,), **facts)
        self.add(fetch, OperationCost(seconds=seconds), -1 - value)

    def posed(self, budget_bytes: int) -> Problem:
        """Return the problem that was put together, in its one order."""
        graph = replace(self.real.graph, operations=tuple(self.operations), values=tuple(self.values), runs_after=None)
        return Problem(graph=graph, costs=tuple(self.costs), budget_bytes=budget_bytes)


class OffloadReduction(Reduction):
    """A ``real`` problem with a host, and its reduction to recompute alone (``problem``).

    In it the chosen values can be fetched, at next to no cost, and cannot be recomputed. So many bytes of the budget
    are to be left free for values that are under way.
    """

    def __init__(self, problem: Problem, chosen: Iterable[int], free_bytes: int = 0) -> None:
        assert problem.host is not None
        super().__init__(problem)
        self.host, self.chosen = problem.host, frozenset(chosen)
        for index, (operation, cost) in enumerate(zip(problem.graph.operations, problem.costs, strict=True)):
            moved = [u for u in operation.outputs if u in self.chosen]
            stays = (u for u in operation.outputs if u not in moved)
            tickets = list(map(self.add_ticket, moved))
            bytes_beside = cost.workspace_bytes + sum(self.values[u].size_bytes for u in moved)
            made = replace(operation, outputs=(*stays, *tickets))
            self.add(made, replace(cost, workspace_bytes=bytes_beside), index)
            for u, ticket in zip(moved, tickets, strict=True):
                seconds = 1e-3 * self.host.seconds(self.values[u].size_bytes)  # next to nothing, since it is to hide
                self.add_fetch(u, ticket, u, seconds, phase=operation.phase, region=operation.region)
        self.problem = self.posed(problem.budget_bytes - free_bytes)

    def order_from(self, steps: Iterable[int]) -> list[int]:
        """Translate runs and fetches, each of which is -1 less the value, into an order of the reduced problem.

        What is chosen and made again is taken as kept.
        """
        place = {step: index for index, step in enumerate(self.stands_for)}
        order, left = list[int](), set(self.chosen)
        for step in steps:
            made = [u for u in self.real.graph.operations[step].outputs if u in left] if step >= 0 else []
            order += [place[step], *(place[-1 - u] for u in made)]
            left.difference_update(made)
        return order

    def invert(self, schedule: Schedule) -> Schedule:
        """Translate a schedule of the reduced problem into one of the real problem."""
        graph = self.problem.graph
        steps = self._needed(recompute_in_regions(graph, schedule) if graph.has_units else schedule)
        return schedule_with_fetches(self.real.graph, steps)

    def _needed(self, schedule: Schedule) -> list[int]:
        """Return the runs whose outputs are used: real operations, and ``-1 - value`` for a fetch.

        Right after the operation that makes a value, its first fetching stands for the value as it was made. Where
        something runs again between the two, the value was not there meanwhile, and is fetched indeed.
        """
        graph = self.real.graph
        wanted = [value.retained for value in graph.values]
        first = schedule.first_runs()
        begins = []
        again = False
        for position, index in enumerate(schedule.order):
            is_first, is_fetch = first[index] == position, self.stands_for[index] < 0
            if not is_fetch:
                again = not is_first
            begins.append(is_first and not (again and is_fetch and self.operations[index].recomputable))
        steps: list[int] = []
        for index, begin in zip(reversed(schedule.order), reversed(begins), strict=True):
            step = self.stands_for[index]
            if step < 0:
                if begin or not wanted[-1 - step]:
                    continue
                wanted[-1 - step] = False
            else:
                operation = graph.operations[step]
                if not begin and not any(wanted[u] and not graph.values[u].retained for u in operation.outputs):
                    continue
                for u in operation.outputs:
                    wanted[u] = False
                for u in operation.inputs:
                    wanted[u] = True
            steps.append(step)
        return steps[::-1]


def schedule_with_fetches(graph: TrainingGraph, steps: Sequence[int]) -> Schedule:
    """Return the schedule of operations and of fetches, each of which is -1 less the value.

    Values leave right after their last use before, and return right before their next.
    """
    fetched = {-1 - step for step in steps if step < 0}
    last_use = dict.fromkeys(fetched, 0)
    due: set[int] = set()
    made: set[int] = set()
    leaves: dict[int, int] = {}
    returns: dict[int, list[int]] = {}
    order: list[int] = []
    for step in steps:
        if step < 0:
            due.add(-1 - step)
            continue
        for u in fetched.intersection(graph.operations[step].inputs):
            if u in due:
                due.remove(u)
                leaves.setdefault(u, last_use[u] + 1)
                returns.setdefault(u, []).append(len(order))
            last_use[u] = len(order)
        for u in fetched.intersection(graph.operations[step].outputs):
            if u in made:  # what is made again stands in for a copy that could as well be gone
                leaves.setdefault(u, last_use[u] + 1)
            made.add(u)
            last_use[u] = len(order)
        order.append(step)
    return Schedule(tuple(order), tuple(Offload(u, leaves[u], tuple(returns[u])) for u in sorted(returns)))


def steps_of(graph: TrainingGraph, schedule: Schedule) -> list[int]:
    """Return the runs and fetches of a schedule, as :func:`schedule_with_fetches` takes them."""
    reads: dict[int, list[int]] = {offload.value: [] for offload in schedule.offloads}
    for place, index in enumerate(schedule.order):
        for u in reads.keys() & set(graph.operations[index].inputs):
            reads[u].append(place)
    fetched: dict[int, list[int]] = {}
    for offload in schedule.offloads:
        read = reads[offload.value]
        for back in offload.returns:
            fetched.setdefault(read[bisect_left(read, back)], []).append(-1 - offload.value)
    return [step for place, index in enumerate(schedule.order) for step in (*fetched.get(place, ()), index)]
