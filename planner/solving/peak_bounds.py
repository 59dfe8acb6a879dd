"""Bounds on the smallest peak: what no plan goes below, and the lowest that a plan was found for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.common.limits import Clock
from planner.common.recent import recent
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.solving.offload_reduction import OffloadReduction
from planner.solving.peak_proof import proven_by_last_births
from planner.solving.repair import lower_peak
from planner.solving.segmentations import segmentations

_SECONDS_PER_OPERATION, _SECONDS_PER_RUN = 1e-3, 3e-6
"""How long to look for a low peak, and about what it takes to look at one schedule; counted as work, so that
the answer is the same every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumPeak:
    """Bounds on the peak of any plan, above what is resident before the step."""

    proven_peak_bytes: int
    """No plan has a lower peak."""
    found_peak_bytes: int
    """The lowest peak for which a plan was found."""
    schedule: Schedule
    """That plan."""


def first_run_bytes(graph: TrainingGraph, costs: Sequence[OperationCost]) -> list[int]:
    """Return the bytes that must be live while each operation first runs; no plan has a lower peak. O(values + inputs).

    While an operation has its first run, its inputs, outputs and workspace are there, with every
    retained value made so far, and every value made before that is read later and cannot be made
    again.
    """
    operations, values = graph.operations, graph.values
    change = [0] * (len(operations) + 1)
    throughout: list[tuple[int, int]] = []
    for u, maker in enumerate(graph.producer):
        last = graph.readers[u][-1] if graph.readers[u] else maker
        if values[u].retained:
            last = len(operations) - 1
        elif operations[maker].recomputable:
            last = maker - 1
        throughout.append((maker, last))
        if last >= maker:
            change[maker] += values[u].size_bytes
            change[last + 1] -= values[u].size_bytes
    found: list[int] = []
    for index, (operation, standing_bytes) in enumerate(zip(operations, accumulate(change), strict=False)):
        own_bytes = sum(
            values[u].size_bytes
            for u in {*operation.inputs, *operation.outputs}
            if not throughout[u][0] <= index <= throughout[u][1]
        )
        found.append(standing_bytes + own_bytes + costs[index].workspace_bytes)
    return found


@recent
def proven_peak(graph: TrainingGraph, costs: Sequence[OperationCost]) -> tuple[int, int]:
    """Return a lower bound that also counts the recomputation of an operation's inputs, and where it binds.

    No lower than those of :func:`first_run_bytes`, and dearer; see :mod:`planner.solving.peak_proof`.
    """
    return proven_by_last_births(graph, costs, first_run_bytes(graph, costs))


@recent
def minimum_peak(graph: TrainingGraph, costs: Sequence[OperationCost]) -> MinimumPeak:
    """Bound the smallest peak from both sides; the upper bound is that of :func:`lowest_schedule`."""
    proven_bytes, _ = proven_peak(graph, costs)
    problem = Problem(graph=graph, costs=tuple(costs), budget_bytes=proven_bytes)
    schedule = lowest_schedule(problem)
    found_bytes = problem.evaluate(schedule).peak_bytes
    return MinimumPeak(proven_peak_bytes=proven_bytes, found_peak_bytes=found_bytes, schedule=schedule)


def lowest_peak(problem: Problem) -> MinimumPeak:
    """Bound the smallest peak of a problem's plans, including those with offload if there is a host."""
    asked = _where_all_may_wait_on_the_host(problem)
    return minimum_peak(asked.graph, asked.costs)


def proven_lowest(problem: Problem) -> int:
    """Return a lower bound on the peak of a problem's plans, including those with offload if there is a host."""
    asked = _where_all_may_wait_on_the_host(problem)
    return proven_peak(asked.graph, asked.costs)[0]


def _where_all_may_wait_on_the_host(problem: Problem) -> Problem:
    host = problem.host
    return problem if host is None else OffloadReduction(problem, host.movable(problem.graph)).problem


def lowest_schedule(problem: Problem, limit_seconds: float = math.inf) -> Schedule:
    """Return the schedule of the lowest peak that quick methods find by recompute, stopping at the budget."""
    seconds = _SECONDS_PER_OPERATION * len(problem.graph.operations)
    clock = Clock(min(seconds, limit_seconds), counts_work=True)
    lowest = (problem.baseline.peak_bytes, Schedule.keep_all(problem.graph))
    for schedule in segmentations(problem.graph):
        peak_bytes = problem.evaluate(schedule).peak_bytes
        if peak_bytes < lowest[0]:
            lowest = (peak_bytes, schedule)
        clock.work(_SECONDS_PER_RUN * len(schedule.order))
        if lowest[0] <= problem.budget_bytes or clock.left() < 0:
            break
    order, _ = lower_peak(problem, lowest[1].order, clock)
    return Schedule(tuple(order))
