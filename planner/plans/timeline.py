"""What the device holds over the step: from a simulation to the points of a chart."""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation
from planner.plans.plan import Timeline, TimelinePoint

MOST_POINTS = 240
"""Of longer steps neighbouring runs share a point, which is as high as the highest of them."""


def timeline_of(
    graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule, evaluation: Evaluation
) -> Timeline:
    """Return the timeline of a schedule, for the whole device.

    Parameters
    ----------
    evaluation : Evaluation
        Its simulation.

    Notes
    -----
    O(runs).
    """
    order, sizes = schedule.order, evaluation.timeline_bytes
    begins, recomputed, backward_seconds = _times(graph, costs, schedule)
    together = max(1, -(-len(order) // MOST_POINTS))
    points = []
    for first in range(0, len(order), together):
        highest = max(range(first, min(first + together, len(order))), key=sizes.__getitem__)
        operation = graph.operations[order[highest]]
        points.append(
            TimelinePoint(
                seconds=begins[first],
                size_bytes=sizes[highest] + graph.total_static_bytes,
                operation=operation.target,
                module=operation.module,
                phase="recompute" if recomputed[highest] else operation.phase.value,
            )
        )
    return Timeline(step_seconds=begins[-1], backward_seconds=backward_seconds, points=tuple(points))


def _times(
    graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule
) -> tuple[list[float], list[bool], float]:
    """Return when each run begins (and when the last one ends), which are recomputations, when the backward begins."""
    begins, recomputed = [0.0], []
    ran: set[int] = set()
    backward_seconds = None
    for index in schedule.order:
        if backward_seconds is None and graph.operations[index].phase is not Phase.FORWARD:
            backward_seconds = begins[-1]
        recomputed.append(index in ran)
        ran.add(index)
        begins.append(begins[-1] + costs[index].seconds)
    return begins, recomputed, begins[-1] if backward_seconds is None else backward_seconds
