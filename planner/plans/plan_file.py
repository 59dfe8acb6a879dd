"""The JSON of a plan, schema 1: a report, and with decisions and fingerprint a plan file.

A plan file is data and nothing else. Reading one trusts nothing: each field's type and range is
checked, and whatever is wrong ends in one :class:`~planner.errors.PlanFileError` that names it.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from planner.common.json_reader import parse, to_data
from planner.errors import PlanFileError

if TYPE_CHECKING:
    from planner.plans.plan import Plan

SCHEMA = 1
"""Version of the JSON that reports and plan files share."""


_OF_THE_FILE = ("fingerprint", "decisions", "order", "values")
"""Keys that a plan file has beside those of a report."""


def report(plan: Plan, *, operations: bool = False) -> dict[str, Any]:
    """Return a plan's report as plain data; every key of it stays in later schemas."""
    data = _data(plan)
    for key in _OF_THE_FILE:
        data.pop(key, None)
    if operations:
        data["operations"] = to_data(plan.operations)
    return data


def _data(plan: Plan) -> dict[str, Any]:
    """Return all that a plan file has, what can be worked out from it included."""
    data: dict[str, Any] = {"schema": SCHEMA, **to_data(plan)}
    data["activation_budget_bytes"] = plan.activation_budget_bytes
    data["predicted"]["overhead"] = plan.overhead
    # Beside a key of schema 1 that says recompute, whatever it is called: the bound is on recompute and waiting.
    data["lower_bound"]["overhead"] = plan.lower_bound_overhead
    if plan.offloading is not None and not plan.offloading.modules:
        del data["offload"]["least_bytes"]  # of no meaning without modules
    return data


def to_json(plan: Plan) -> str:
    """Return the text of a plan file, its decisions last."""
    data = _data(plan)
    data |= {key: data.pop(key) for key in _OF_THE_FILE if key in data}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def from_json(text: str, kind: type[Plan]) -> Plan:
    """Read the text of a plan file as that type."""
    root = parse(text, "plan")
    schema = root["schema"].read(int)
    if schema != SCHEMA:
        raise PlanFileError(f"the plan is of schema {schema}, and schema {SCHEMA} is what can be read here")
    if root["status"].read(str) == "infeasible":
        raise PlanFileError("this is the report of a budget that no plan fits; it holds no plan")
    plan = root.read(kind)
    if plan.offloading is not None and root["offload"].has("modules"):
        root["offload"]["least_bytes"]  # comes with them
    _hold_together(plan)
    return plan


def _hold_together(plan: Plan) -> None:
    """Refuse a plan whose own numbers contradict each other, as an edited or mixed-up file's do."""
    alive_bytes = sum(plan.anatomy.values())
    if alive_bytes != plan.peak_bytes:
        raise PlanFileError(f"predicted.anatomy_bytes adds up to {alive_bytes}, not to the peak of {plan.peak_bytes}")
    if not (math.isfinite(plan.overhead) and plan.lower_bound_seconds <= plan.added_seconds):
        raise PlanFileError("predicted.recompute_seconds, lower_bound and baseline.step_seconds contradict each other")
    if plan.peak_bytes > plan.budget_bytes:
        raise PlanFileError(f"predicted.peak_bytes is {plan.peak_bytes}, above the budget of {plan.budget_bytes}")
    if plan.optimizer_peak_bytes > plan.budget_bytes:
        raise PlanFileError(f"optimizer_step.peak_bytes is above the budget of {plan.budget_bytes}")
    if plan.total_static_bytes > plan.peak_bytes:
        raise PlanFileError(f"static_bytes adds up to {plan.total_static_bytes}, above the peak of {plan.peak_bytes}")
    for number, row in enumerate(plan.values.rows if plan.values is not None else ()):
        if any(source >= number for source in row.made_from):
            raise PlanFileError(f"values.rows.made_from[{number}] names a row that is not above it")
    details = plan.details
    if details is None:
        return
    for name, timeline, peak_bytes in (
        ("before", details.before, plan.baseline_peak_bytes),
        ("after", details.after, plan.peak_bytes),
    ):
        where = f"details.timeline.{name}"
        if timeline.points and timeline.peak_bytes != peak_bytes:
            raise PlanFileError(f"{where} peaks at {timeline.peak_bytes}, not at {peak_bytes} as the plan says")
        times = [0.0, *(point.seconds for point in timeline.points), timeline.step_seconds]
        if times != sorted(times) or timeline.backward_seconds > timeline.step_seconds:
            raise PlanFileError(f"{where} is not in the order of time")
    alive_bytes = sum(row.size_bytes for row in details.alive)
    if alive_bytes > plan.peak_bytes - plan.total_static_bytes:
        raise PlanFileError(f"details.alive_at_peak adds up to {alive_bytes}, above what the step makes")
