"""Reduce offload to recompute: fetching a value counts as recomputing it at next to no cost.

A value that may be offloaded is taken as made by an operation of its own, right after the one that
really makes it, which reads nothing that takes memory: making it again stands for fetching it. What
a solver then runs again of these operations are offloads, what else it runs again is recompute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner.ir.graph import Operation, OperationCost, TrainingGraph, Value
from planner.ir.problem import Problem
from planner.ir.schedule import Offload, Schedule, recompute_in_regions


class OffloadReduction:
    """A ``real`` problem with a host, and its reduction to recompute alone (``problem``).

    In it the chosen values can be fetched, and cannot be recomputed. So many bytes of the budget are to be left free
    for values that are under way. The price is what a second of transfer costs, in seconds of computing: next to
    nothing if it hides, 1 if it does not.
    """

    def __init__(self, problem: Problem, chosen: Iterable[int], *, spare_bytes: int = 0, price: float = 1e-3) -> None:
        assert problem.host is not None
        self.real, self.host, self.chosen = problem, problem.host, frozenset(chosen)
        graph = problem.graph
        values = list(graph.values)
        operations: list[Operation] = []
        costs: list[OperationCost] = []
        self.stands_for: list[int] = []
        """For each operation of the problem as posed, the real one; for one that fetches, -1 less the value."""
        for index, (operation, cost) in enumerate(zip(graph.operations, problem.costs, strict=True)):
            moved = [u for u in operation.outputs if u in self.chosen]
            tickets = tuple(range(len(values), len(values) + len(moved)))
            values += [Value(name=f"ticket of {values[u].name}", size_bytes=0) for u in moved]
            stays = (u for u in operation.outputs if u not in moved)
            operations.append(replace(operation, outputs=(*stays, *tickets)))
            held_bytes = sum(values[u].size_bytes for u in moved)
            costs.append(replace(cost, workspace_bytes=cost.workspace_bytes + held_bytes))
            self.stands_for.append(index)
            for u, ticket in zip(moved, tickets, strict=True):
                name = f"fetch of {values[u].name}"
                operations.append(
                    Operation(
                        name=name, key=name, target="", inputs=(ticket,), outputs=(u,), phase=operation.phase,
                        region=operation.region,
                    )
                )  # fmt: skip
                costs.append(OperationCost(seconds=price * self.host.seconds(values[u].size_bytes)))
                self.stands_for.append(-1 - u)
        self.problem = Problem(
            graph=replace(graph, operations=tuple(operations), values=tuple(values), runs_after=None),
            costs=tuple(costs),
            budget_bytes=problem.budget_bytes - spare_bytes,
        )

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
            is_first = first[index] == position
            if self.stands_for[index] >= 0:
                again = not is_first
            begins.append(is_first and not (again and self.stands_for[index] < 0))
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
