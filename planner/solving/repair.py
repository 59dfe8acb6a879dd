"""Local search on a schedule: recompute what is idle at the peak until it fits, then drop needless recomputation.

It proves nothing and always ends. Solvers use it to bring a good schedule that breaks the budget
somewhere under it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter

from planner.common.limits import Clock
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import Copy, lifetimes

_SECONDS_PER_RUN = 1e-5
"""About what it takes to look at a schedule, for each of its runs."""


def without_useless(problem: Problem, order: Sequence[int]) -> list[int]:
    """Remove recomputations whose outputs are unused, and fetches likewise: an order may have -1 less a value."""
    operations, values = problem.graph.operations, problem.graph.values
    first = {index: position for position, index in reversed(list(enumerate(order)))}
    wanted = [False] * len(values)
    kept: list[int] = []
    for position in range(len(order) - 1, -1, -1):
        index = order[position]
        outputs = operations[index].outputs if index >= 0 else (-1 - index,)
        is_first = index >= 0 and first[index] == position
        if not is_first and not any(wanted[u] and not values[u].retained for u in outputs):
            continue
        kept.append(index)
        for u in outputs:
            wanted[u] = False
        for u in operations[index].inputs if index >= 0 else ():
            wanted[u] = True
    return kept[::-1]


class Layout:
    """A schedule as the simulator sees it, laid out for asking questions about one position. O(runs x reads)."""

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        graph, schedule = problem.graph, Schedule(tuple(order))
        self.problem, self.order = problem, order
        self.first = schedule.first_runs()
        self.bytes = problem.evaluate(schedule).timeline_bytes
        self.peak_bytes = max(self.bytes, default=0)
        self.reads: list[list[int]] = [[] for _ in graph.values]
        """By value, where it is read."""
        for position, index in enumerate(order):
            for u in graph.operations[index].inputs:
                self.reads[u].append(position)
        self.copies = lifetimes(graph, schedule)
        self.copies_of: list[list[Copy]] = [[] for _ in graph.values]
        for copy in self.copies:  # a retained value that is made again is gone at once
            if not (graph.values[copy.value].retained and self.copies_of[copy.value]):
                self.copies_of[copy.value].append(copy)

    def copy_at(self, value: int, position: int) -> Copy:
        """Return the newest copy of a value made before a position."""
        copies = self.copies_of[value]
        return copies[bisect_left(copies, position, key=attrgetter("born")) - 1]


def _rerun(layout: Layout, value: int, peak: int, target: int) -> tuple[list[int], int, float] | None:
    """Plan to recompute a value before ``target`` instead of holding it across ``peak``: runs, bytes freed, seconds."""
    problem = layout.problem
    operations, values, producer = problem.graph.operations, problem.graph.values, problem.graph.producer
    density = problem.costs[producer[value]].seconds / max(values[value].size_bytes, 1)
    freed = values[value].size_bytes
    stack = [producer[value]]
    chosen = {producer[value]}
    seconds = 0.0
    while stack:
        index = stack.pop()
        operation = operations[index]
        if not operation.recomputable or len(chosen) > 200:
            return None
        seconds += problem.costs[index].seconds
        if operation.state_bytes and layout.first[index] <= peak:
            freed -= operation.state_bytes
        for u in operation.inputs:
            maker = producer[u]
            if maker in chosen:
                continue
            old = layout.copy_at(u, target)
            if old.died >= target or old.died > peak:
                continue
            size = values[u].size_bytes
            if not operations[maker].recomputable or size * density <= problem.costs[maker].seconds * 0.5:
                freed -= size
                if freed <= 0:
                    return None
                continue
            chosen.add(maker)
            stack.append(maker)
    return sorted(chosen), freed, seconds


def _idle(layout: Layout, peak: int) -> list[tuple[int, int]]:
    """Return the values that are idle at a position, each with the position of its next read."""
    found = []
    values = layout.problem.graph.values
    for copy in layout.copies:
        u, reads = copy.value, layout.reads[copy.value]
        if copy.born < peak < copy.died and values[u].size_bytes and not values[u].retained:
            place = bisect_left(reads, peak)
            if reads[place] != peak:
                found.append((u, reads[place]))
    return found


def lower_peak(problem: Problem, order: Sequence[int], clock: Clock) -> tuple[list[int], int]:
    """Insert recomputations, cheapest per byte freed first, until the peak is within the budget or time is up.

    The order of the lowest peak that was seen comes back, and that peak.
    """
    order = list(order)
    layout = Layout(problem, order)
    best, best_peak = order, layout.peak_bytes
    patience = 0
    while layout.peak_bytes > problem.budget_bytes and patience < 60 and clock.left() > 0:
        clock.work(len(order) * _SECONDS_PER_RUN)
        peak = layout.bytes.index(layout.peak_bytes)
        over = layout.peak_bytes - problem.budget_bytes
        offers = []
        for value, target in _idle(layout, peak):
            offer = _rerun(layout, value, peak, target)
            if offer is not None and offer[1] > 0:
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
        layout = Layout(problem, order)
        patience += 1
        if layout.peak_bytes < best_peak:
            best, best_peak, patience = order, layout.peak_bytes, 0
    return best, best_peak


def take_back(
    problem: Problem, order: Sequence[int], clock: Clock, fits: Callable[[Schedule], bool] = lambda _: True
) -> list[int]:
    """Remove recomputations, dearest first, while the peak stays within the budget and the rest ``fits``.

    A rerun is looked at in O(gap since the copy before); each removal costs one :class:`Layout`.
    """
    order = list(order)
    seconds = [cost.seconds for cost in problem.costs]
    layout = Layout(problem, order)
    refused: set[tuple[int, int]] = set()
    while clock.left() > 0:
        occurrence: dict[int, int] = {}
        reruns = []
        for position, index in enumerate(order):
            count = occurrence[index] = occurrence.get(index, -1) + 1
            if count and (index, count) not in refused:
                reruns.append((seconds[index], position, count))
        reruns.sort(key=lambda rerun: (-rerun[0], rerun[1]))
        for cost, position, count in reruns:
            if cost <= 0.0:
                return order
            if _can_go(layout, position):
                clock.work(len(order) * _SECONDS_PER_RUN)
                trial = without_useless(problem, order[:position] + order[position + 1 :])
                trial_layout = Layout(problem, trial)
                if trial_layout.peak_bytes <= problem.budget_bytes and fits(Schedule(tuple(trial))):
                    order, layout = trial, trial_layout
                    break
            refused.add((order[position], count))
        else:
            return order
    return order


def _can_go(layout: Layout, position: int) -> bool:
    """Whether keeping the earlier copies in place of a recomputation would fit, by their bytes alone."""
    graph, budget_bytes = layout.problem.graph, layout.problem.budget_bytes
    for u in graph.operations[layout.order[position]].outputs:
        if graph.values[u].retained or not graph.values[u].size_bytes:
            continue
        again = layout.copy_at(u, position + 1)
        start = layout.copy_at(u, position).died + 1
        if again.died == again.born:
            continue
        if start < position and max(layout.bytes[start:position]) + graph.values[u].size_bytes > budget_bytes:
            return False
    return True
