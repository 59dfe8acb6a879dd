"""What a strategy offloads, written into a schedule: where values leave, and where they return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from planner.ir.checkpoints import Region, schedule_of
from planner.ir.cut_points import turning_point
from planner.ir.problem import Problem
from planner.ir.schedule import Offload, Schedule
from planner.solving.transfer_windows import widened
from planner.strategies._step import StrategyStep


def offloaded(
    step: StrategyStep, schedule: Schedule, values: Iterable[int], returns: Mapping[int, int] | None = None
) -> Schedule:
    """Let values be away from their last use in the forward to their first in the backward.

    What nobody reads in the backward stays. ``returns`` holds earlier positions to return at. Raises UsageError if
    there is no host.
    """
    if step.host is None:
        raise step.cannot("has no host's memory to offload to: nothing is known of the device's link to it")
    turn = schedule.order.index(turning_point(step.graph))
    wanted = set(values)
    last: dict[int, int] = {}
    due: dict[int, int] = {}
    for position, index in enumerate(schedule.order):
        operation = step.graph.operations[index]
        if position < turn:
            last.update(dict.fromkeys(wanted.intersection((*operation.inputs, *operation.outputs)), position))
        else:
            for value in wanted.intersection(operation.inputs):
                due.setdefault(value, position)
            wanted.difference_update(operation.outputs)  # what is made again is not fetched
    early = returns or {}
    return Schedule(
        schedule.order,
        tuple(Offload(value, last[value] + 1, (early.get(value, due[value]),)) for value in sorted(due)),
    )


def inputs_offloaded(
    step: StrategyStep,
    regions: Sequence[Region],
    *,
    at_least_bytes: int = 0,
    keeps_last: bool = False,
    ahead: bool = False,
) -> Schedule:
    """Run regions again from inputs that wait on the host: all, or those at least so large, but for the last region.

    With ``ahead`` the inputs of one region come back while the backward of the region after it runs.
    """
    schedule = schedule_of(step.graph, regions)
    entering = step.entering(regions)[: len(regions) - 1 if keeps_last else None]
    sizes = step.graph.values
    moved = [[value for value in values if sizes[value].size_bytes >= at_least_bytes] for values in entering]
    begins = [_begin(schedule, region) for region in regions]
    returns = {value: begins[place + 1] for place, values in enumerate(moved[: len(regions) - 1]) for value in values}
    return offloaded(step, schedule, chain.from_iterable(moved), returns if ahead else None)


def _begin(schedule: Schedule, region: Region) -> int:
    """Return the position at which a region begins to run again."""
    first_run = schedule.order.index(region.recompute_before)
    while schedule.order[first_run - 1] in region.recompute:
        first_run -= 1
    return first_run


def hiding(step: StrategyStep, schedule: Schedule) -> Schedule:
    """Let transfers take the time that they can have without another peak."""
    problem = Problem(graph=step.graph, costs=tuple(step.costs), budget_bytes=0, host=step.host)
    return widened(replace(problem, budget_bytes=problem.evaluate(schedule).peak_bytes), schedule)
