"""Local search on a schedule: recompute what is idle at the peak until it fits.

It proves nothing and always ends. Solvers use it to bring a good schedule that breaks the budget
somewhere under it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter

from planner.common.limits import Clock
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import Copy, lifetimes

_SECONDS_PER_RUN = 1e-5
"""About what it takes to look at a schedule, for each of its runs."""

_PATIENCE, _RUNS_AT_ONCE = 60, 200
"""Rounds in a row that bring no lower peak, until it ends; and operations that one value may run again, at most."""

_BORN = attrgetter("born")


def without_useless(problem: Problem, order: Sequence[int]) -> list[int]:
    """Leave out the reruns whose results nobody reads."""
    operations, values = problem.graph.operations, problem.graph.values
    first = Schedule(tuple(order)).first_runs()
    wanted = [False] * len(values)
    kept: list[int] = []
    for position in range(len(order) - 1, -1, -1):
        index = order[position]
        outputs = operations[index].outputs
        if first[index] != position and not any(wanted[u] and not values[u].retained for u in outputs):
            continue
        kept.append(index)
        for u in outputs:
            wanted[u] = False
        for u in operations[index].inputs:
            wanted[u] = True
    return kept[::-1]


class _Layout:
    """A schedule with what the simulator says of it, laid out for asking what is idle at its peak.

    Building one is O(runs x (inputs + outputs)).
    """

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.problem, schedule = problem, Schedule(tuple(order))
        evaluation = problem.evaluate(schedule)
        self.peak_bytes, self.peak = evaluation.peak_bytes, evaluation.peak_position
        self.runs: dict[int, list[int]] = {}
        """Where each operation runs."""
        for position, index in enumerate(order):
            self.runs.setdefault(index, []).append(position)
        self.touched = {*problem.graph.operations[order[self.peak]].inputs} if order else set[int]()
        """What is read at the peak."""
        self.copies: dict[int, list[Copy]] = {}
        """Of each value that does not stay anyway."""
        for copy in lifetimes(problem.graph, schedule):
            if not problem.graph.values[copy.value].retained:
                self.copies.setdefault(copy.value, []).append(copy)

    def idle(self) -> Iterator[tuple[int, int]]:
        """Return the values live but unused at the peak, each with the position of its next read."""
        graph = self.problem.graph
        for u, copies in self.copies.items():
            if u in self.touched or not graph.values[u].size_bytes:
                continue
            if any(copy.born < self.peak < copy.died for copy in copies):
                yield u, min(after for reader in graph.readers[u] if (after := self.next_run(reader)) > self.peak)

    def next_run(self, operation: int) -> int:
        """Return where an operation runs next after the peak, or last."""
        runs = self.runs[operation]
        return runs[min(bisect_right(runs, self.peak), len(runs) - 1)]

    def rerun(self, value: int, target: int) -> tuple[list[int], int, float] | None:
        """Plan to make a value again before ``target`` and not hold it over the peak: runs, bytes freed, seconds."""
        problem = self.problem
        operations, values, producer = problem.graph.operations, problem.graph.values, problem.graph.producer
        freed = values[value].size_bytes
        density = problem.costs[producer[value]].seconds / freed
        chosen = {producer[value]}
        stack, seconds = [*chosen], 0.0
        while stack:
            index = stack.pop()
            if not operations[index].recomputable or len(chosen) > _RUNS_AT_ONCE:
                return None
            seconds += problem.costs[index].seconds
            if operations[index].state_bytes and self.runs[index][0] <= self.peak:
                freed -= operations[index].state_bytes
            for u in operations[index].inputs:
                maker = producer[u]
                if maker in chosen or self.is_there(u, target):
                    continue
                is_dear = values[u].size_bytes * density <= problem.costs[maker].seconds * 0.5
                if operations[maker].recomputable and not is_dear:
                    chosen.add(maker)
                    stack.append(maker)
                    continue
                freed -= values[u].size_bytes
                if freed <= 0:
                    return None
        return (sorted(chosen), freed, seconds) if freed > 0 else None

    def is_there(self, value: int, target: int) -> bool:
        """Say whether the newest copy of a value before ``target`` is still there then, or was at the peak."""
        copies = self.copies.get(value)
        if copies is None:
            return True
        copy = copies[bisect_right(copies, target - 1, key=_BORN) - 1]
        return copy.died >= min(target, self.peak + 1)


def lower_peak(problem: Problem, order: Sequence[int], clock: Clock) -> tuple[list[int], int]:
    """Insert reruns, cheapest per byte freed first, until the peak is within the budget, or the clock says to give up.

    The order of the lowest peak that was seen comes back, and that peak.
    """
    order = list(order)
    layout = _Layout(problem, order)
    best, best_peak = order, layout.peak_bytes
    patience = 0
    while layout.peak_bytes > problem.budget_bytes and patience < _PATIENCE and clock.left() > 0:
        clock.work(len(order) * _SECONDS_PER_RUN)
        over = layout.peak_bytes - problem.budget_bytes
        offers = []
        for value, target in layout.idle():
            if (offer := layout.rerun(value, target)) is not None:
                runs, freed, seconds = offer
                offers.append(((seconds + 1e-12) / min(freed, over), target, runs, freed))
        if not offers:
            break
        offers.sort(key=lambda offer: offer[0])
        insert: dict[int, set[int]] = {}
        gained = 0
        for _, target, runs, freed in offers[: 1 + len(offers) // 16]:
            insert.setdefault(target, set()).update(runs)
            gained += freed
            if 2 * gained >= over:
                break
        order = [index for position, old in enumerate(order) for index in (*sorted(insert.get(position, ())), old)]
        order = without_useless(problem, order)
        layout = _Layout(problem, order)
        patience += 1
        if layout.peak_bytes < best_peak:
            best, best_peak, patience = order, layout.peak_bytes, 0
    return best, best_peak
