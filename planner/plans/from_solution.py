"""Write a solution out as a plan: decisions, predicted figures, comparisons, and warnings on its gap and price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.common.limits import SolveLimits
from planner.common.units import format_bytes, format_percent
from planner.findings import step_rules
from planner.findings.finding import Finding
from planner.findings.rules import CapturedStep, Subject, examine
from planner.ir.caches import seconds_more
from planner.ir.graph import TrainingGraph
from planner.ir.layers import find_layers
from planner.ir.order import in_own_order, moved, order_of
from planner.ir.problem import Problem, Solution, confirm
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation
from planner.ir.static_memory import StaticMemory
from planner.plans.allocator import optimizer_peak_bytes, reserve_warnings, reserved_by_cuda, whole_peak_bytes
from planner.plans.comparison import baseline_rows
from planner.plans.liveness import anatomy_of_peak, call_memory, locate_peak, placement
from planner.plans.module_choices import kept_of
from planner.plans.offload import offloading_of
from planner.plans.ordering import smallest_budgets
from planner.plans.plan import CapturedOrder, OperationRow, Plan, PlanOrigin
from planner.plans.policy_reduction import policy_finding
from planner.plans.step_details import step_details
from planner.plans.values import value_table


def plan_from_solution(
    problem: Problem,
    solution: Solution,
    *,
    origin: PlanOrigin | None = None,
    static_memory: StaticMemory | None = None,
    compare: bool = True,
    limits: SolveLimits | None = None,
) -> Plan:
    """Convert a solution to a plan; its claim is simulated once more.

    Without ``compare`` there are no baselines and no details of the step and its values, and the plan's own peak stands
    for the smallest feasible one. The limits are for the choice of regions with the lowest peak.
    """
    origin, static_memory = origin or PlanOrigin(), static_memory or StaticMemory()
    evaluation = confirm(problem, solution)
    captured, order = problem, moved(problem.graph, order_of(solution.schedule))
    problem, schedule = in_own_order(problem, solution.schedule)
    solution = replace(solution, schedule=schedule)
    graph, costs, static_bytes = problem.graph, problem.costs, problem.graph.total_static_bytes
    lowest_bytes, proven_bytes = whole_peak_bytes(problem, schedule, static_memory), 0
    beside: dict[str, Any] = {"baselines": ()}
    if compare:
        limits = limits or SolveLimits()
        lowest_bytes, proven_bytes = smallest_budgets(captured, problem, schedule, limits, static_memory)
        beside = _compared(captured, problem, solution, evaluation)
    count = sum(map(len, order.values()))
    optimizer_bytes = optimizer_peak_bytes(graph, static_memory)
    smallest_bytes = max(lowest_bytes, optimizer_bytes)
    reserved = reserved_by_cuda(problem, schedule, static_memory)
    found = _warnings(problem, evaluation, solution, limits or SolveLimits(), smallest_bytes if compare else None)
    plan = Plan(
        model=graph.name,
        fingerprint=dict(origin.fingerprint),
        **{name: getattr(origin, name) for name in ("capture_seconds", "cost_model", "device", "runtime", "eager")},
        torch=origin.torch_version,
        status="optimal" if solution.is_optimal else "feasible",
        budget_bytes=problem.budget_bytes + static_bytes,
        static_bytes=dict(graph.static_bytes),
        baseline_peak_bytes=captured.baseline.peak_bytes + static_bytes,
        baseline_step_seconds=captured.baseline.seconds,
        peak_bytes=evaluation.peak_bytes + static_bytes,
        peak_at=locate_peak(graph, schedule, evaluation),
        recompute_seconds=evaluation.recompute_seconds,
        cache_seconds=seconds_more(graph, costs, schedule),
        lower_bound_seconds=min(solution.lower_bound_seconds, evaluation.added_seconds),
        minimum_feasible_peak_bytes=smallest_bytes,
        proven_minimum_peak_bytes=proven_bytes,
        optimizer_step_bytes=static_memory.optimizer_step_bytes,
        optimizer_peak_bytes=optimizer_bytes,
        reserved=reserved,
        solver=solution.solver,
        solve_seconds=solution.solve_seconds,
        anatomy=anatomy_of_peak(graph, costs, schedule, evaluation),
        placement=placement(graph, costs, schedule, find_layers(graph)),
        **beside,
        recomputations=_decisions(graph, schedule),
        order=order,
        captured_order=CapturedOrder(moved=count, recompute_seconds=solution.captured_seconds) if count else None,
        warnings=(*found, *reserve_warnings(problem, reserved, static_memory), *origin.warnings),
        offloading=offloading_of(problem, schedule, evaluation, solution.alone_seconds),
        operations=_operation_rows(problem, schedule),
        call_memory=call_memory(graph, schedule, evaluation),
    )
    return plan if problem.regions is None else replace(plan, kept=kept_of(plan, problem))


def _compared(captured: Problem, problem: Problem, solution: Solution, evaluation: Evaluation) -> dict[str, Any]:
    """Return the comparisons that a report shows beside a plan, by field."""
    return {
        "baselines": tuple(baseline_rows(captured.without_policy(), problem.without_policy(), solution)),
        "details": step_details(captured, problem, solution.schedule, evaluation),
        "values": value_table(problem, solution.schedule) if problem.regions is None else None,
    }


def with_comparison(problem: Problem, plan: Plan, static_memory: StaticMemory, limits: SolveLimits) -> Plan:
    """Add the comparisons to a plan that was made without them, without solving again."""
    schedule = plan.schedule_for(problem.graph)
    known = {name: getattr(plan, name) for name in ("lower_bound_seconds", "solve_seconds")}
    solution = Solution.simulated(problem.evaluate(schedule), schedule, plan.solver, **known)
    compared = plan_from_solution(problem, solution, static_memory=static_memory, limits=limits)
    of_others = ("baselines", "details", "values", "minimum_feasible_peak_bytes", "proven_minimum_peak_bytes")
    return replace(plan, **{name: getattr(compared, name) for name in of_others})


def _warnings(
    problem: Problem, evaluation: Evaluation, solution: Solution, limits: SolveLimits, smallest_bytes: int | None
) -> Iterator[Finding]:
    """Return the warnings on a simulated plan; see :func:`price_finding`."""
    if (policy := policy_finding(problem)) is not None:
        yield policy
    if evaluation.added_seconds <= 0:
        return
    step = CapturedStep(problem=problem, schedule=solution.schedule, evaluation=evaluation)
    yield from examine(Subject(step=step), step_rules.RULES)
    if (price := price_finding(problem, evaluation, smallest_bytes)) is not None:
        yield price
    if (gap := gap_finding(problem, solution, evaluation, limits)) is not None:
        yield gap


def _decisions(graph: TrainingGraph, schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Return the recomputations before each operation, in single operations."""
    operations = graph.operations
    return {
        operations[at].key: tuple(key for index in again for key in operations[index].keys)
        for at, again in schedule.recomputations().items()
    }


def _operation_rows(problem: Problem, schedule: Schedule) -> tuple[OperationRow, ...]:
    graph, runs = problem.graph, Counter(schedule.order)
    return tuple(
        OperationRow(
            operation=op.target,
            module=op.module,
            phase=op.phase.value,
            flops=op.flops,
            moved_bytes=op.moved_bytes,
            seconds=cost.seconds,
            workspace_bytes=cost.workspace_bytes,
            output_bytes=sum(graph.values[value].size_bytes for value in op.outputs),
            runs=runs[index],
        )
        for index, (op, cost) in enumerate(zip(graph.operations, problem.costs, strict=True))
    )


GAP = "gap-to-bound"
PRICE = "dearer-than-the-step"

_WORTH_SAYING = 0.005
"""From so large a gap on, as a share of the step, a finding reports it."""


def price_finding(problem: Problem, evaluation: Evaluation, smallest_bytes: int | None) -> Finding | None:
    """Warn of a simulated plan that more than doubles the step; None if it does not.

    ``smallest_bytes`` is the smallest budget of the whole device for which a plan is known, if that was asked for.
    """
    step_seconds = max(problem.baseline.seconds, 1e-12)
    if evaluation.added_seconds <= step_seconds:
        return None
    near = ""
    if smallest_bytes is not None:
        above = (problem.budget_bytes + problem.graph.total_static_bytes) / max(smallest_bytes, 1) - 1
        near = f", with {format_percent(max(above, 0.0))} more than the smallest budget known to be feasible, "
        near += format_bytes(smallest_bytes)
    return Finding(
        rule=PRICE,
        evidence=f"the plan takes {1 + evaluation.added_seconds / step_seconds:.1f} times as long as the step without "
        f"it{near}",
        cause="so near the smallest budget a few percent of it save much time, or cost much",
        fix="raise the budget a little: 'what-if' (planner.what_if) shows what each one costs",
    )


def gap_finding(problem: Problem, solution: Solution, evaluation: Evaluation, limits: SolveLimits) -> Finding | None:
    """Warn of a simulated solution that is far from its bound; None if it is near."""
    step_seconds = max(problem.baseline.seconds, 1e-12)
    gap_seconds = evaluation.added_seconds - solution.lower_bound_seconds
    if gap_seconds < _WORTH_SAYING * step_seconds or solution.lower_bound_seconds <= 0:
        return None
    return Finding(
        rule=GAP,
        evidence=f"the plan pays {format_percent(gap_seconds / step_seconds)} of the step more than the proven lower "
        "bound",
        cause="a cheaper plan, or a better bound, may exist",
        fix=f"give the solver more time (--time-limit {2 * limits.time_limit_seconds:g}), or a slightly larger budget",
    )
