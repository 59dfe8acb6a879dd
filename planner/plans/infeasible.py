"""What is said when no plan keeps a budget: the JSON of schema 1, and the message made of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from planner.common.units import format_bytes
from planner.ir.problem import Problem
from planner.plans.parts import SCHEMA, PeakLocation, PlanOrigin


def infeasible_report(
    problem: Problem,
    *,
    minimum_feasible_peak_bytes: int,
    proven_minimum_peak_bytes: int,
    where: PeakLocation,
    origin: PlanOrigin,
) -> dict[str, Any]:
    """Give the report on a budget that no plan keeps.

    Parameters
    ----------
    problem : Problem
    minimum_feasible_peak_bytes : int
        Smallest peak on the whole device for which a plan is known.
    proven_minimum_peak_bytes : int
        No plan at all has a lower one.
    where : PeakLocation
        The operation at which the smallest peak stands.
    origin : PlanOrigin
    """
    static_bytes = problem.graph.total_static_bytes
    return {
        "schema": SCHEMA,
        "model": problem.graph.name,
        "torch": origin.torch_version,
        "status": "infeasible",
        "budget_bytes": problem.budget_bytes + static_bytes,
        "activation_budget_bytes": problem.budget_bytes,
        "static_bytes": dict(problem.graph.static_bytes),
        "baseline": {
            "peak_bytes": problem.baseline.peak_bytes + static_bytes,
            "step_seconds": problem.baseline.seconds,
        },
        "minimum_feasible_peak_bytes": minimum_feasible_peak_bytes,
        "proven_minimum_peak_bytes": proven_minimum_peak_bytes,
        "peak_at": asdict(where),
        "capture_seconds": origin.capture_seconds,
        "cost_model": origin.cost_model,
        "device": origin.device,
    }


def infeasible_message(report: dict[str, Any]) -> str:
    """Say what does not fit and what would; whether that is proven or only all that was found shows in the verb."""
    budget, smallest_bytes = format_bytes(report["budget_bytes"]), report["minimum_feasible_peak_bytes"]
    smallest = f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes)"
    if report["budget_bytes"] < report["proven_minimum_peak_bytes"]:
        return f"no plan fits {budget}: the smallest feasible budget is {smallest}"
    return f"no plan was found that fits {budget}: the smallest budget known to be feasible is {smallest}"
