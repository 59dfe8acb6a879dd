"""Whether a plan belongs to a step: fingerprints compared."""

from __future__ import annotations

from planner.errors import PlanMismatchError
from planner.plans.parts import PlanOrigin
from planner.plans.plan import Plan

OF_THE_GRAPH = ("assumes", "operations", "graph")
"""Keys of a fingerprint that say how a step was captured; the others say what of, and where."""


def check_match(plan: Plan, origin: PlanOrigin) -> None:
    """Refuse a plan of another graph.

    Raises
    ------
    PlanMismatchError
        Naming what differs.
    """
    theirs, ours = plan.fingerprint, origin.fingerprint
    if theirs.get("graph") == ours["graph"]:
        return
    keys = [key for key in ours if theirs.get(key) != ours[key]]
    if not assumes_the_same(plan, origin):  # a batch that needs a mask, say, has a graph of its own
        keys = [key for key in keys if key not in OF_THE_GRAPH]
        if not keys:
            return
    _refuse(plan, origin, keys)


def check_same_step(plan: Plan, origin: PlanOrigin) -> None:
    """Refuse a plan of another model, other sizes or another device, however its graph was captured.

    Raises
    ------
    PlanMismatchError
        Naming what differs.
    """
    theirs, ours = plan.fingerprint, origin.fingerprint
    keys = [key for key in ours if key not in OF_THE_GRAPH and theirs.get(key) != ours[key]]
    if keys:
        _refuse(plan, origin, keys)


def _refuse(plan: Plan, origin: PlanOrigin, keys: list[str]) -> None:
    differs = [
        f"{key} is {plan.fingerprint.get(key)!r} in the plan and {origin.fingerprint[key]!r} here" for key in keys
    ]
    raise PlanMismatchError(
        f"the plan was made for something else: {'; '.join(differs)}. Plan again, or pass replan=True"
    )


def assumes_the_same(plan: Plan, origin: PlanOrigin) -> bool:
    """Whether a plan and a step are captured under the same assumptions on inputs."""
    return plan.fingerprint.get("assumes", "") == origin.fingerprint["assumes"]
