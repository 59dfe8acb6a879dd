"""The error for a budget that no plan fits: the smallest budget that has a plan, and what limits it."""

from __future__ import annotations

from dataclasses import asdict, replace

from planner.common.options import Search
from planner.common.units import format_bytes
from planner.errors import HostBudgetError, InfeasibleBudgetError
from planner.ir.problem import Problem
from planner.ir.static_memory import StaticMemory
from planner.plans.allocator import OPTIMIZER_STEP, whole_peak_bytes
from planner.plans.liveness import locate_operation
from planner.plans.ordering import lowest_plan_known, proven_in_orders_tried
from planner.plans.plan import SCHEMA, NoPlanFitsError, PlanOrigin
from planner.plans.policy_reduction import decided_operations
from planner.solvers.auto import AutoSolver
from planner.solvers.offload_search import first_within, lowest_offloading, ranked
from planner.solving import lowest_known
from planner.solving.modules.ilp import lowest_choice


def too_little(problem: Problem, search: Search, why: str, after_bytes: int = 0) -> InfeasibleBudgetError:
    """Return the error of a budget that resident memory, or the optimizer's step, exceeds."""
    found = [known] if (known := lowest_plan_known(problem, search)) is not None else []
    if problem.regions is not None:
        found.insert(0, lowest_choice(problem, search.clock()))
    else:
        alone = replace(problem, host=None)
        found.insert(0, AutoSolver().lowest(alone, effort=search, progress=search.progress))
    if problem.host is not None:  # within its memory: a ViT-L was promised 21 GB that take hundreds of it
        found.append(lowest_offloading(problem, first_within(problem, ranked(problem))))
    lowest = min(found, key=lambda schedule: problem.evaluate(schedule).peak_bytes)
    lowest = lowest if search.deterministic else lowest_known.lower(problem, lowest)
    evaluation = problem.evaluate(lowest)
    operation = problem.graph.operations[lowest.order[evaluation.peak_position]].name
    before_bytes = evaluation.peak_bytes + problem.graph.total_static_bytes
    return InfeasibleBudgetError(
        f"{why} breaks the budget",
        minimum_feasible_peak_bytes=max(after_bytes, before_bytes),
        operation=OPTIMIZER_STEP if after_bytes >= before_bytes else operation,
        is_proven=after_bytes > 0,
        lowest=lowest,
    )


def no_plan_fits(
    problem: Problem, error: InfeasibleBudgetError, search: Search, origin: PlanOrigin, static_memory: StaticMemory
) -> NoPlanFitsError:
    """Return the error with a feasible budget of the whole device, what limits it, and whether that is proven."""
    graph, static_bytes = problem.graph, problem.graph.total_static_bytes
    proven_bytes = proven_in_orders_tried(problem)
    budget_bytes, smallest_bytes = problem.budget_bytes + static_bytes, error.minimum_feasible_peak_bytes
    if error.lowest is not None:  # a solver knows what is asked for, and not blocks
        smallest_bytes = max(smallest_bytes, whole_peak_bytes(problem, error.lowest, static_memory))
        if static_memory.has_caching_allocator and lowest_known.applies_to(replace(problem, host=None)):
            lowest_known.say(problem, error.lowest)
    proven_bytes = max(proven_bytes, problem.budget_bytes + 1 if error.is_proven else 0) + static_bytes
    where = locate_operation(graph, error.operation)
    none = "plan" if problem.regions is None else "choice of modules"
    none_below = f"; no {none} needs less than {format_bytes(proven_bytes)}" if proven_bytes < smallest_bytes else ""
    smallest = f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes{none_below})"
    found = f"no plan {'fits' if budget_bytes < proven_bytes else 'was found that fits'} {format_bytes(budget_bytes)}"
    found += f": the smallest {'feasible budget' if smallest_bytes <= proven_bytes else 'budget known to be feasible'}"
    found += f" is {smallest}"
    way_out = decided_operations(problem) or _way_out(problem, smallest_bytes, search.solver, error)
    message = f"{found}, bound by {where}; {way_out}"
    report = {
        "schema": SCHEMA,
        "model": graph.name,
        "torch": origin.torch_version,
        "status": "infeasible",
        "budget_bytes": budget_bytes,
        "activation_budget_bytes": problem.budget_bytes,
        "static_bytes": dict(graph.static_bytes),
        "baseline": {
            "peak_bytes": problem.baseline.peak_bytes + static_bytes,
            "step_seconds": problem.baseline.seconds,
        },
        **({"eager": asdict(origin.eager)} if origin.eager is not None else {}),
        "minimum_feasible_peak_bytes": smallest_bytes,
        "proven_minimum_peak_bytes": proven_bytes,
        "peak_at": asdict(where),
        "capture_seconds": origin.capture_seconds,
        "cost_model": origin.cost_model,
        "device": origin.device,
        "message": message,
    }
    return NoPlanFitsError(
        message,
        minimum_feasible_peak_bytes=smallest_bytes,
        operation=where.operation,
        is_proven=budget_bytes < proven_bytes,
        lower_bound_seconds=error.lower_bound_seconds,
        report=report,
    )


def _way_out(problem: Problem, smallest_bytes: int, solver: str, error: InfeasibleBudgetError) -> str:
    static_bytes, operation = problem.graph.total_static_bytes, error.operation
    if isinstance(error, HostBudgetError):
        return (
            f"a plan is known that offloads {format_bytes(error.host_budget_bytes)} ({error.host_budget_bytes} bytes): "
            "give that much as host_budget (--host-budget)"
        )
    if operation == OPTIMIZER_STEP:
        return "gradients, state and temporaries are in memory together: foreach=False, or fused=True, needs less"
    if smallest_bytes <= problem.budget_bytes + static_bytes:
        return f"solver {solver!r} did not find that plan in time: give it more time, or use another"
    if problem.budget_bytes <= 0:
        return f"{format_bytes(static_bytes)} are resident before the step begins"
    retained_bytes = sum(value.size_bytes for value in problem.graph.values if value.retained)
    if retained_bytes > problem.budget_bytes:
        return f"{format_bytes(retained_bytes)} of gradients and outputs are left when the step ends"
    return (
        "raise the budget, make the batch or the sequence smaller, or compute what is largest in chunks "
        "(--chunk auto, runtime=Runtime(chunk='auto'))"
    )
