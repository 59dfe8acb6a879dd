"""The details of a plan in its file: written as plain data, read as untrusted."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.common.json_reader import Node
from planner.errors import PlanFileError
from planner.plans.plan import AliveTensors, MoreMemory, StepDetails, Timeline, TimelinePoint

if TYPE_CHECKING:
    from planner.plans.plan import Plan


def details_data(details: StepDetails) -> dict[str, Any]:
    """Give details as the JSON of a plan has them."""
    return {
        "timeline": {"before": asdict(details.before), "after": asdict(details.after)},
        "alive_at_peak": [asdict(row) for row in details.alive],
        "one_more_gib": None if details.one_more_gib is None else asdict(details.one_more_gib),
    }


def read_details(node: Node) -> StepDetails:
    """Read the details of a plan.

    Raises
    ------
    PlanFileError
        If they are not what they should be.
    """
    more = node["one_more_gib"]
    return StepDetails(
        before=_timeline(node["timeline"]["before"]),
        after=_timeline(node["timeline"]["after"]),
        alive=tuple(_alive(row) for row in node["alive_at_peak"].items()),
        one_more_gib=None
        if more.is_null()
        else MoreMemory(budget_bytes=more["budget_bytes"].integer(), overhead=more["overhead"].number()),
    )


def hold_to_plan(plan: Plan) -> None:
    """Refuse details that contradict their plan.

    Raises
    ------
    PlanFileError
        Naming the first contradiction.
    """
    if plan.details is None:
        return
    for name, timeline, peak_bytes in (
        ("before", plan.details.before, plan.baseline_peak_bytes),
        ("after", plan.details.after, plan.peak_bytes),
    ):
        where = f"details.timeline.{name}"
        if timeline.points and timeline.peak_bytes != peak_bytes:
            raise PlanFileError(f"{where} peaks at {timeline.peak_bytes}, not at {peak_bytes} as the plan says")
        times = [0.0, *(point.seconds for point in timeline.points), timeline.step_seconds]
        if times != sorted(times) or timeline.backward_seconds > timeline.step_seconds:
            raise PlanFileError(f"{where} is not in the order of time")
    alive_bytes = sum(row.size_bytes for row in plan.details.alive)
    if alive_bytes > plan.peak_bytes - plan.total_static_bytes:
        raise PlanFileError(f"details.alive_at_peak adds up to {alive_bytes}, above what the step makes")


def _timeline(node: Node) -> Timeline:
    return Timeline(
        step_seconds=node["step_seconds"].number(),
        backward_seconds=node["backward_seconds"].number(),
        points=tuple(
            TimelinePoint(
                seconds=point["seconds"].number(),
                size_bytes=point["size_bytes"].integer(),
                operation=point["operation"].text(),
                module=point["module"].text(),
                phase=point["phase"].text(),
            )
            for point in node["points"].items()
        ),
    )


def _alive(node: Node) -> AliveTensors:
    return AliveTensors(
        count=node["count"].integer(),
        size_bytes=node["size_bytes"].integer(),
        kind=node["kind"].text(),
        operation=node["operation"].text(),
        module=node["module"].text(),
        source=node["source"].text(),
    )
