"""From a costed graph and a budget to a plan, or to the error that says what would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from planner.common import timings
from planner.common.limits import SolveLimits
from planner.common.options import Budget, Search
from planner.common.units import format_bytes
from planner.errors import HostBudgetError, InfeasibleBudgetError
from planner.findings.finding import Finding
from planner.findings.rules import examine
from planner.findings.step_rules import BOTTLENECKS
from planner.findings.subject import CapturedStep, Subject
from planner.ir.checkpoints import Region, nothing_unread
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import Host, graph_for
from planner.ir.layers import find_layers
from planner.ir.order import in_own_order, moved, order_of
from planner.ir.problem import Problem, Solution, confirm
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation
from planner.ir.static_memory import StaticMemory
from planner.plans.allocator import OPTIMIZER_STEP, optimizer_peak_bytes, reserve_warnings, reserved_by_cuda
from planner.plans.arena import arena_of
from planner.plans.baselines import baseline_rows
from planner.plans.blocks import solved_in_blocks, whole_peak_bytes
from planner.plans.gap import gap_finding, price_finding
from planner.plans.liveness import anatomy_of_peak, locate_operation, locate_peak, placement
from planner.plans.module_choices import with_choices
from planner.plans.offload import offloading_of
from planner.plans.ordering import in_orders_tried, solved_in_best_order
from planner.plans.plan import CapturedOrder, NoPlanFitsError, OperationRow, Plan, PlanOrigin
from planner.plans.plan_file import SCHEMA
from planner.plans.step_details import step_details
from planner.plans.values import value_table
from planner.solvers import solved
from planner.solvers.auto import AutoSolver
from planner.solvers.checkpoints import lowest_choice
from planner.solving import lowest_known, solution_cache
from planner.solving.incumbent import Incumbent
from planner.solving.peak_bounds import lowest_peak, proven_lowest

_SHORTER = 4
"""By what the time for a search is divided that comes after another."""


def _warnings(
    problem: Problem, evaluation: Evaluation, solution: Solution, limits: SolveLimits, smallest_bytes: int | None
) -> Iterator[Finding]:
    """Look for what limits a plan, of which this is the simulation; see :func:`price_finding`."""
    offloads = solution.schedule.offloads
    if lossy := [offload for offload in offloads if offload.lossy]:
        size_bytes = sum(problem.graph.values[offload.value].size_bytes for offload in lossy)
        yield Finding(
            rule="lossy-offload",
            evidence=f"{len(lossy)} of the {len(offloads)} values that wait on the host, {format_bytes(size_bytes)}, "
            "are rounded there to bfloat16",
            cause="they come back off by up to a 256th part, and so does what is recomputed from them: gradients are "
            "not bit-equal to those of the step without recompute",
            fix="let 'verify' measure how far off they are; leave out --offload-lossy (offload_lossy) for equal bits",
        )
    if evaluation.added_seconds <= 0:
        return
    step = CapturedStep(problem=problem, schedule=solution.schedule, evaluation=evaluation)
    yield from examine(Subject(step=step), BOTTLENECKS)
    if (price := price_finding(problem, evaluation, smallest_bytes)) is not None:
        yield price
    if (gap := gap_finding(problem, solution, evaluation, limits)) is not None:
        yield gap


def make_plan(
    problem: Problem,
    search: Search | None = None,
    *,
    origin: PlanOrigin | None = None,
    static_memory: StaticMemory | None = None,
) -> Plan:
    """Find the cheapest plan for a problem; the optimizer's step, which ``static_memory`` tells of, must fit too.

    What a model's own backward computes again is not held instead, however large the budget:
    see :func:`within_as_written`.
    A NoPlanFitsError says that no plan fits, and which is the smallest budget for which there is one.
    """
    search, graph = search or Search(), problem.graph
    origin = origin or PlanOrigin()
    written = within_as_written(problem, origin)
    if written is not None:
        plan = make_plan(written, search, origin=origin, static_memory=static_memory)
        return replace(plan, budget_bytes=problem.budget_bytes + graph.total_static_bytes)
    static_memory = static_memory or StaticMemory()
    after_bytes = optimizer_peak_bytes(graph, static_memory)
    try:
        if problem.budget_bytes <= 0:
            raise _too_little(problem, search, "what is resident alone")
        if static_memory.optimizer_step_bytes and after_bytes > problem.budget_bytes + graph.total_static_bytes:
            raise _too_little(problem, search, "the optimizer's step", after_bytes)
        with timings.stage("solving"):
            again = replace(search, time_limit_seconds=search.time_limit_seconds / _SHORTER)
            solution = solved_in_blocks(
                problem,
                static_memory,
                lambda asked: solved_in_best_order(asked, search if asked is problem else again, _solved),
                lambda: None if search.deterministic else lowest_known.said(problem),
            )
    except InfeasibleBudgetError as error:
        raise _no_plan_fits(problem, error, search, origin, static_memory) from error
    return plan_from_solution(
        problem, solution, origin=origin, static_memory=static_memory, compare=search.compare, limits=search
    )


def within_as_written(problem: Problem, origin: PlanOrigin) -> Problem | None:
    """Return a problem with the budget of the step as its author wrote it, if that is less; None otherwise.

    A backward that is written by hand may compute again what its forward did not save. Equal operations are merged, so
    the step without recompute holds all of that. A plan may, as far as it then holds no more than eager's step, or than
    the captured one that computes as much again.
    """
    if problem.regions is not None or not any(operation.again for operation in problem.graph.operations):
        return None
    written_bytes = problem.evaluate(Schedule.as_written(problem.graph)).peak_bytes
    eager_bytes = origin.eager.peak_bytes - problem.graph.total_static_bytes if origin.eager is not None else 0
    most_bytes = max(written_bytes, eager_bytes)
    too_much = min(problem.budget_bytes, problem.baseline.peak_bytes)
    return replace(problem, budget_bytes=most_bytes) if most_bytes < too_much else None


def _solved(problem: Problem, search: Search) -> Solution:
    """Return the solution that was found before, or search for one and keep it."""
    if problem.regions is not None:  # what is kept does not say which regions were chosen
        return solved(problem, search.solver, effort=search, progress=search.progress)
    key = solution_cache.key_of(problem, search.solver, search)
    found = solution_cache.find(problem, key)
    if found is None:
        found = _searched(problem, search)
        solution_cache.keep(key, found)
    return found


def _searched(problem: Problem, search: Search) -> Solution:
    """Search for a solution; the lowest plan that was ever found for the step is one, where it keeps the budget.

    Without it a budget that one search found feasible could be refused by the next.
    """
    known = _lowest_known(problem, search)
    solver = AutoSolver(known) if search.solver == AutoSolver.name else search.solver
    try:
        return solved(problem, solver, effort=search, progress=search.progress)
    except InfeasibleBudgetError as error:
        if search.deterministic or not lowest_known.applies_to(problem):
            raise
        lowest = known if error.lowest is None else lowest_known.lower(problem, error.lowest)
        if lowest is None:
            raise
        incumbent = Incumbent(problem)
        incumbent.raise_bound(error.lower_bound_seconds)
        incumbent.see(lowest)
        raise incumbent.infeasible(proven=error.is_proven) from error


def make_problem(
    graph: TrainingGraph,
    costs: Sequence[OperationCost],
    budget: Budget,
    *,
    host: Host | None = None,
    regions: tuple[Region, ...] | None = None,
    whole_bytes: int | None = None,
) -> Problem:
    """Return the problem that a budget poses: what is resident is subtracted here, and only here.

    A percentage is of ``whole_bytes``, if they are given, else of the given graph's peak without recompute.
    """
    static_bytes = graph.total_static_bytes
    if whole_bytes is None:
        whole_bytes = unplanned_bytes(graph, costs) if budget.is_share else static_bytes
    there_bytes = static_bytes + graph.found_bytes
    limit_bytes = max(budget.in_bytes(max(whole_bytes, there_bytes), there_bytes), budget.at_least_bytes) - static_bytes
    graph = graph_for(graph, host)
    return Problem(graph=graph, costs=tuple(costs), budget_bytes=limit_bytes, host=host, regions=regions)


def unplanned_bytes(graph: TrainingGraph, costs: Sequence[OperationCost]) -> int:
    """Return the peak of the whole device without recompute."""
    return Problem(graph=graph, costs=tuple(costs), budget_bytes=0).baseline.peak_bytes + graph.total_static_bytes


def plan_from_solution(
    problem: Problem,
    solution: Solution,
    *,
    origin: PlanOrigin | None = None,
    static_memory: StaticMemory | None = None,
    compare: bool = True,
    limits: SolveLimits | None = None,
) -> Plan:
    """Write out a solution as a plan; its claim is held against the simulator once more.

    Without ``compare`` there are no baselines and no details of the step and its values, and the plan's own peak stands
    for the smallest feasible one. The limits are for the choice of regions with the lowest peak.
    """
    origin, static_memory = origin or PlanOrigin(), static_memory or StaticMemory()
    with timings.stage("simulation"):
        evaluation = confirm(problem, solution)
    captured, order = problem, moved(problem.graph, order_of(solution.schedule))
    problem, schedule = in_own_order(problem, solution.schedule)
    solution = replace(solution, schedule=schedule)
    graph, costs = problem.graph, problem.costs
    static_bytes = graph.total_static_bytes
    lowest_bytes, proven_bytes = whole_peak_bytes(problem, schedule, static_memory), 0
    beside: dict[str, Any] = {"baselines": ()}
    if compare:
        with timings.stage("baselines"):
            ends = _smallest_budgets(captured, problem, schedule, limits or SolveLimits(), static_memory)
            lowest_bytes, proven_bytes = ends
            beside = {
                "baselines": tuple(baseline_rows(captured, problem, solution)),
                "details": step_details(captured, problem, schedule, evaluation),
                "values": value_table(problem, schedule) if problem.regions is None else None,
            }
    optimizer_bytes = optimizer_peak_bytes(graph, static_memory)
    smallest_bytes = max(lowest_bytes, optimizer_bytes)
    reserved = reserved_by_cuda(problem, schedule, static_memory)
    plan = Plan(
        model=graph.name,
        fingerprint=dict(origin.fingerprint),
        status="optimal" if solution.is_optimal else "feasible",
        budget_bytes=problem.budget_bytes + static_bytes,
        static_bytes=dict(graph.static_bytes),
        baseline_peak_bytes=captured.baseline.peak_bytes + static_bytes,
        baseline_step_seconds=captured.baseline.seconds,
        peak_bytes=evaluation.peak_bytes + static_bytes,
        peak_at=locate_peak(graph, schedule, evaluation),
        recompute_seconds=evaluation.recompute_seconds,
        lower_bound_seconds=min(solution.lower_bound_seconds, evaluation.added_seconds),
        minimum_feasible_peak_bytes=smallest_bytes,
        proven_minimum_peak_bytes=proven_bytes,
        optimizer_step_bytes=static_memory.optimizer_step_bytes,
        optimizer_peak_bytes=optimizer_bytes,
        reserved=reserved,
        arena=arena_of(problem, schedule, static_memory),
        solver=solution.solver,
        solve_seconds=solution.solve_seconds,
        capture_seconds=origin.capture_seconds,
        cost_model=origin.cost_model,
        device=origin.device,
        torch=origin.torch_version,
        runtime=origin.runtime,
        anatomy=anatomy_of_peak(graph, costs, schedule, evaluation),
        placement=placement(graph, costs, schedule, find_layers(graph)),
        **beside,
        recomputations=_decisions(graph, schedule),
        order=order,
        captured_order=CapturedOrder(moved=sum(map(len, order.values())), recompute_seconds=solution.captured_seconds)
        if order
        else None,
        warnings=(
            *_warnings(problem, evaluation, solution, limits or SolveLimits(), smallest_bytes if compare else None),
            *reserve_warnings(problem, reserved, static_memory),
            *origin.warnings,
        ),
        eager=origin.eager,
        offloading=offloading_of(problem, schedule, evaluation),
        operations=_operation_rows(problem, schedule),
    )
    return plan if problem.regions is None else with_choices(plan, problem, solution)


def with_comparison(problem: Problem, plan: Plan, static_memory: StaticMemory, limits: SolveLimits) -> Plan:
    """Return a plan for a problem that was made without comparison with what it then lacks; nothing is solved again."""
    schedule = plan.schedule_for(problem.graph)
    solution = Solution.simulated(
        problem.evaluate(schedule), schedule, plan.solver, lower_bound_seconds=plan.lower_bound_seconds
    )
    solution = replace(solution, solve_seconds=plan.solve_seconds)
    compared = plan_from_solution(problem, solution, static_memory=static_memory, limits=limits)
    return replace(
        plan,
        baselines=compared.baselines,
        details=compared.details,
        values=compared.values,
        minimum_feasible_peak_bytes=compared.minimum_feasible_peak_bytes,
        proven_minimum_peak_bytes=compared.proven_minimum_peak_bytes,
    )


def smallest_budget(problem: Problem, schedule: Schedule, limits: SolveLimits, static_memory: StaticMemory) -> int:
    """Return the smallest budget of the whole device for which a plan is known; a plan's own schedule is one of them.

    That is what a plan says that was made with comparison.
    """
    lowest_bytes, _ = _smallest_budgets(problem, *in_own_order(problem, schedule), limits, static_memory)
    return max(lowest_bytes, optimizer_peak_bytes(problem.graph, static_memory))


def _smallest_budgets(
    captured: Problem, problem: Problem, schedule: Schedule, limits: SolveLimits, static_memory: StaticMemory
) -> tuple[int, int]:
    """Return what :func:`_smallest` says, of a plan in its own order and of all orders that are tried."""
    ends = [_smallest(problem, schedule, limits, static_memory)]
    for other in in_orders_tried(captured):
        if other.graph != problem.graph:
            ends.append(_smallest(other, Schedule.keep_all(other.graph), limits, static_memory))
    lowest_bytes, proven_bytes = (min(end) for end in zip(*ends, strict=True))
    return lowest_bytes, proven_bytes


def _smallest(
    problem: Problem, schedule: Schedule, limits: SolveLimits, static_memory: StaticMemory
) -> tuple[int, int]:
    """Return the smallest budget of the whole device that is known to do, and what no plan needs less than, or 0.

    A plan's own schedule is among those that are known.
    """
    own_bytes = whole_peak_bytes(problem, schedule, static_memory)
    if problem.regions is not None:
        lowest = lowest_choice(problem, limits.clock())
        return min(own_bytes, whole_peak_bytes(problem, lowest, static_memory)), 0
    floor, known = lowest_peak(problem), _lowest_known(problem, limits)
    static_bytes = problem.graph.total_static_bytes
    proven_bytes = floor.proven_peak_bytes + static_bytes
    if problem.host is not None:  # the floor's schedule is of another graph
        return min(own_bytes, floor.found_peak_bytes + static_bytes), proven_bytes
    others = [floor.schedule] if known is None else [floor.schedule, known]
    found_bytes = min(problem.evaluate(other).peak_bytes for other in others)
    is_lower = problem.evaluate(schedule).peak_bytes < found_bytes
    if is_lower and not limits.deterministic and lowest_known.applies_to(problem):
        lowest_known.keep(problem, schedule)
    return min(own_bytes, *(whole_peak_bytes(problem, other, static_memory) for other in others)), proven_bytes


def _lowest_known(problem: Problem, limits: SolveLimits) -> Schedule | None:
    """Return the lowest plan that was ever found; what is deterministic depends on nothing that was found before."""
    return lowest_known.find(problem) if not limits.deterministic and lowest_known.applies_to(problem) else None


def _too_little(problem: Problem, search: Search, why: str, after_bytes: int = 0) -> InfeasibleBudgetError:
    """Return the error of a budget that no search can keep, as what is resident, or the optimizer's step, breaks it."""
    floor = lowest_peak(problem)
    lowest_bytes, lowest = floor.found_peak_bytes, None
    found = [known] if (known := _lowest_known(problem, search)) is not None else []
    if problem.host is None and problem.regions is None:
        found.insert(0, AutoSolver().lowest(problem, effort=search, progress=search.progress))
    if found:
        lowest = min(found, key=lambda schedule: problem.evaluate(schedule).peak_bytes)
        lowest_bytes = problem.evaluate(lowest).peak_bytes
    before_bytes = lowest_bytes + problem.graph.total_static_bytes
    return InfeasibleBudgetError(
        f"{why} breaks the budget",
        minimum_feasible_peak_bytes=max(after_bytes, before_bytes),
        operation=OPTIMIZER_STEP if after_bytes >= before_bytes else floor.found_operation,
        is_proven=after_bytes > 0,
        lowest=lowest,
    )


def _no_plan_fits(
    problem: Problem, error: InfeasibleBudgetError, search: Search, origin: PlanOrigin, static_memory: StaticMemory
) -> NoPlanFitsError:
    """Say in whole-device bytes which budget would do, and what is in the way; the verb says whether that is proven."""
    graph, static_bytes = problem.graph, problem.graph.total_static_bytes
    proven_bytes = min(map(proven_lowest, in_orders_tried(replace(problem, graph=nothing_unread(graph)))))
    budget_bytes, smallest_bytes = problem.budget_bytes + static_bytes, error.minimum_feasible_peak_bytes
    if error.lowest is not None and problem.host is None:  # a solver knows what is asked for, and not blocks
        smallest_bytes = max(smallest_bytes, whole_peak_bytes(problem, error.lowest, static_memory))
        if static_memory.has_caching_allocator and not search.deterministic and lowest_known.applies_to(problem):
            lowest_known.say(problem, error.lowest)
    proven_bytes = max(proven_bytes, problem.budget_bytes + 1 if error.is_proven else 0) + static_bytes
    where = locate_operation(graph, error.operation)
    none = "plan" if problem.regions is None else "choice of modules"
    none_below = f"; no {none} needs less than {format_bytes(proven_bytes)}" if proven_bytes < smallest_bytes else ""
    budget, smallest = (
        format_bytes(budget_bytes),
        f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes{none_below})",
    )
    found = f"no plan {'fits' if budget_bytes < proven_bytes else 'was found that fits'} {budget}"
    found += f": the smallest {'feasible budget' if smallest_bytes <= proven_bytes else 'budget known to be feasible'}"
    found += f" is {smallest}"
    message = f"{found}, bound by {where}; {_way_out(problem, smallest_bytes, search.solver, error)}"
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
        return "gradients, state and its temporaries are there at once: foreach=False, or fused=True, needs less"
    if smallest_bytes <= problem.budget_bytes + static_bytes:
        return f"solver {solver!r} did not find that plan in time: give it more, or take another"
    if problem.budget_bytes <= 0:
        return f"{format_bytes(static_bytes)} are resident before the step begins"
    retained_bytes = sum(value.size_bytes for value in problem.graph.values if value.retained)
    if retained_bytes > problem.budget_bytes:
        return f"{format_bytes(retained_bytes)} of gradients and outputs are left when the step ends"
    return (
        "raise the budget, make the batch or the sequence smaller, or compute what is largest in chunks "
        "(--chunk auto, chunk='auto')"
    )


def _decisions(graph: TrainingGraph, schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Write out what runs again before each operation, whichever operations are one with others."""
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
