"""Carrying a plan over to a step that it was not made for: other input sizes, or the same step captured again."""

from __future__ import annotations

from dataclasses import replace

from planner.errors import PlanMismatchError, ScheduleError
from planner.ir.problem import Problem, Solution
from planner.ir.static_memory import OF_THE_MODEL, SHARDS, Surroundings
from planner.plans.parts import PlanOrigin
from planner.plans.plan import Plan
from planner.plans.planning import plan_from_solution
from planner.plans.reservation import optimizer_peak_bytes


def take_over(
    problem: Problem, plan: Plan, *, origin: PlanOrigin, around: Surroundings, compare: bool, asked_for: bool
) -> Plan | None:
    """Carry a plan over to a step whose operations have the same keys, if it keeps the budgets there.

    One that recomputes what the budget leaves room for is not, unless it is of this very graph and asked for: its
    budget may have been kept by compiled code, which can need more than the graph.

    Parameters
    ----------
    problem : Problem
        Of that step.
    plan : Plan
    origin : PlanOrigin
        Of that step.
    around : Surroundings
        What is resident around that step.
    compare : bool
        Whether to simulate the baselines for the report.
    asked_for : bool
        Whether it is this plan that is wanted.

    Returns
    -------
    Plan or None
    """
    graph = problem.graph
    try:
        schedule = plan.schedule_for(graph)
        if schedule.offloads and problem.host is None:
            return None
        evaluation = problem.evaluate(schedule)
    except (PlanMismatchError, ScheduleError):  # keys that are not there; or values that leave before their last use
        return None
    same_graph = plan.fingerprint.get("graph") == origin.fingerprint["graph"]
    unneeded = evaluation.added_seconds > 0 and problem.baseline.peak_bytes <= problem.budget_bytes
    unneeded = unneeded and not (asked_for and same_graph)
    after_bytes = optimizer_peak_bytes(graph, around) - graph.total_static_bytes
    if max(evaluation.peak_bytes, after_bytes) > problem.budget_bytes or unneeded:
        return None
    if problem.host is not None and evaluation.host_bytes > problem.host.budget_bytes:
        return None
    solution = Solution(
        solver=plan.solver if same_graph else f"{plan.solver.removesuffix(' (reused)')} (reused)",
        schedule=schedule,
        peak_bytes=evaluation.peak_bytes,
        recompute_seconds=evaluation.added_seconds,
        lower_bound_seconds=min(plan.lower_bound_seconds, evaluation.added_seconds) if same_graph else 0.0,
    )
    taken = plan_from_solution(problem, solution, origin=origin, surroundings=around, compare=compare)
    if same_graph and plan.cost_model != origin.cost_model:  # its times were measured, and still hold
        taken = replace(
            taken,
            cost_model=plan.cost_model,
            baseline_step_seconds=plan.baseline_step_seconds,
            recompute_seconds=plan.recompute_seconds,
            offloading=plan.offloading,
            lower_bound_seconds=plan.lower_bound_seconds,
            status=plan.status,
            details=plan.details or taken.details,
        )
    return taken


def as_planned(around: Surroundings, plan: Plan) -> Surroundings:
    """Give surroundings as a plan has them; what is there because of the model itself stays as it is."""
    of_model = {kind: size_bytes for kind, size_bytes in around.static_bytes.items() if kind in OF_THE_MODEL}
    beside = {kind: size_bytes for kind, size_bytes in plan.static_bytes.items() if kind not in OF_THE_MODEL}
    shards = int(plan.fingerprint.get(SHARDS, 1))
    if shards > 1:
        of_model["parameters"] = plan.static_bytes["parameters"]
    return replace(
        around,
        gradient_shards=shards,
        static_bytes=of_model | beside,
        optimizer_step_bytes=plan.optimizer_step_bytes,
        tensor_bytes=(*around.tensor_bytes[:-1], sum(beside.values()) - beside.get("reserve", 0)),
    )
