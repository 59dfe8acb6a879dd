"""Plan a costed graph for a budget, or raise the error that names a feasible one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from planner.common.limits import Clock
from planner.common.options import Budget, Search
from planner.errors import InfeasibleBudgetError
from planner.ir.checkpoints import Region
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import Host
from planner.ir.order import in_own_order, order_of, renumbered
from planner.ir.policy import Decisions, Policy, decide, run_once
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.ir.static_memory import StaticMemory
from planner.plans.allocator import optimizer_peak_bytes
from planner.plans.from_solution import GAP, PRICE, plan_from_solution
from planner.plans.in_blocks import bounded_by, cheaper, exchanged_in_blocks, solved_in_blocks
from planner.plans.no_plan_fits import no_plan_fits, too_little
from planner.plans.ordering import lowest_plan_known, solved_in_best_order
from planner.plans.plan import Plan, PlanOrigin
from planner.plans.policy_reduction import solved_by_policy
from planner.solvers import solved, with_known_minimum
from planner.solvers.auto import AutoSolver
from planner.solvers.search import SOLVER as annealing
from planner.solvers.search import is_compiled
from planner.solving import lowest_known, solution_cache
from planner.solving.incumbent import Incumbent
from planner.solving.repair import lower_peak, take_back

_SHORTER = 4
"""By what the time for a search is divided that comes after another."""


_LEAST_SHARE = 0.1
"""Of its time, what a search has even where those before it took all."""

_NEAR = 0.005
"""So far from the bound, as a share of the step, a plan that offloads is improved further, blocks counted."""

_SHARES = 0.35, 0.4, 0.75
"""Of the time: for a plan without offload; at least for one with it; and when that one is to be there. The rest is for
what breaks the budget in blocks."""


def make_problem(
    graph: TrainingGraph,
    costs: Sequence[OperationCost],
    budget: Budget,
    *,
    host: Host | None = None,
    regions: tuple[Region, ...] | None = None,
    whole_bytes: int | None = None,
    policy: Policy | None = None,
) -> Problem:
    """Return the problem that a budget poses: what is resident is subtracted here, and only here.

    A percentage is of ``whole_bytes``, if they are given, else of the given graph's peak without recompute. Where a
    policy moves values, the order of operations is fixed: another order would number them anew.
    """
    static_bytes = graph.total_static_bytes
    if whole_bytes is None:
        whole_bytes = unplanned_bytes(graph, costs) if budget.is_share else static_bytes
    there_bytes = static_bytes + graph.found_bytes
    limit_bytes = max(budget.in_bytes(max(whole_bytes, there_bytes), there_bytes), budget.at_least_bytes) - static_bytes
    decisions = Decisions() if policy is None else decide(graph, policy, can_offload=host is not None)
    graph = run_once(graph, decisions)
    if decisions.moves:
        graph = replace(graph, runs_after=None)
    return Problem(
        graph=graph, costs=tuple(costs), budget_bytes=limit_bytes, host=host, regions=regions, decisions=decisions
    )


def unplanned_bytes(graph: TrainingGraph, costs: Sequence[OperationCost]) -> int:
    """Return the peak of the whole device without recompute."""
    return Problem(graph=graph, costs=tuple(costs), budget_bytes=0).baseline.peak_bytes + graph.total_static_bytes


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
            raise too_little(problem, search, "what is resident alone")
        if static_memory.optimizer_step_bytes and after_bytes > problem.budget_bytes + graph.total_static_bytes:
            raise too_little(problem, search, "the optimizer's step", after_bytes)
        solution = _or_from_below(problem, search, partial(_found, problem, search, static_memory))
    except InfeasibleBudgetError as error:
        raise no_plan_fits(problem, error, search, origin, static_memory) from error
    missing = annealing.missing(search) if problem.regions is None and problem.host is None else ""
    used = problem.as_used_by(solution.schedule)
    plan = plan_from_solution(
        used, solution, origin=origin, static_memory=static_memory, compare=search.compare, limits=search
    )
    advised = (replace(each, fix=missing) if missing and each.rule in (PRICE, GAP) else each for each in plan.warnings)
    return replace(plan, warnings=tuple(advised))


def _found(problem: Problem, search: Search, static_memory: StaticMemory) -> Solution:
    """Search for a solution whose blocks keep the budget too, for what the limits say in all.

    With a host's memory, recompute alone is solved before, and the solution that offloads is taken if it saves as much
    of the step as the host says, blocks counted in both: so more freedom costs no plan more.
    """
    clock, host = search.clock(), problem.host
    if host is None or problem.decisions.moves:
        return _in_blocks(problem, search, search, static_memory, clock)
    shares = _SHARES[0], _SHARES[1 if search.deterministic else 2]
    shorter, rest = (replace(search, time_limit_seconds=share * search.time_limit_seconds) for share in shares)
    worth_seconds = host.least_gain * problem.baseline.seconds

    def without(first: Search) -> Solution | None:
        # Where its share of the time was too little, a plan that offloads was taken at +1,053%, near a ViT-B's floor.
        asked = replace(problem, host=None)
        with suppress(InfeasibleBudgetError):
            return _or_from_below(asked, first, lambda: _in_blocks(asked, search, first, static_memory, first.clock()))
        return None

    alone = without(shorter)
    if alone is not None and alone.added_seconds <= worth_seconds:
        return alone
    try:
        found = _in_blocks(problem, search, rest, static_memory, clock, known=alone)
    except InfeasibleBudgetError:
        if alone is None:
            raise
        found = replace(alone, lower_bound_seconds=0.0)
    exchange_clock = Clock(search.time_limit_seconds / _SHORTER, counts_work=True)
    for start in (alone, found):
        if start is not None and found.added_seconds - found.lower_bound_seconds > _NEAR * problem.baseline.seconds:
            found = cheaper(found, exchanged_in_blocks(problem, static_memory, start, exchange_clock.part(0.5)))
    if alone is None:
        return found
    if alone.lower_bound_seconds - found.added_seconds <= worth_seconds:  # with more time it may cost less
        alone = cheaper(alone, without(search) or alone)
    if alone.added_seconds - found.added_seconds <= worth_seconds:
        return alone if host.least_gain else bounded_by(found, alone)
    return replace(found, captured_seconds=alone.captured_seconds, alone_seconds=alone.added_seconds)


def _in_blocks(
    problem: Problem,
    search: Search,
    first: Search,
    static_memory: StaticMemory,
    clock: Clock,
    known: Solution | None = None,
) -> Solution:
    """Solve a problem under the limits ``first``, and for less memory as long as blocks break the budget.

    Each starts from the solution before. A T5 whose blocks broke the budget came out with no offload, where recompute
    alone took what time was left; a ResNet-50, 3 MiB over, with 33% for 24.7, where a short search began anew.
    """
    again = replace(search, time_limit_seconds=search.time_limit_seconds / _SHORTER)

    def solve(asked: Problem) -> Solution:
        nonlocal known
        limits = first if asked is problem else again
        if asked.host is None or asked.decisions.moves:
            known = _recomputed(asked, limits, clock, known, first)
            return known
        # The first has its share even where recompute alone took more than that.
        least_seconds = _SHARES[1] * search.time_limit_seconds
        own_clock = Clock(max(least_seconds, clock.left(_SHARES[2]))) if asked is problem else clock
        if known is None:
            known = _solved(asked, limits, own_clock)
        else:
            posed, schedule = in_own_order(asked, known.schedule)
            found = _solved(posed, limits, own_clock, schedule)
            known = replace(found, schedule=renumbered(found.schedule, order_of(known.schedule)))
        return known

    return solved_in_blocks(
        problem,
        static_memory,
        solve,
        lambda: None if search.deterministic or problem.decisions.moves else lowest_known.said(problem),
        replace(again, deterministic=True).clock,
    )


def _recomputed(problem: Problem, search: Search, clock: Clock, known: Solution | None, longer: Search) -> Solution:
    """Solve a problem without the host's memory, or recompute more than a known solution, if that is cheaper.

    Where neither is found beside a known solution, it is solved under the limits ``longer``, from the lowest peak up.
    """
    lowered = None
    if known is not None and problem.regions is None and not problem.decisions.moves:
        (posed, schedule), repair_clock = in_own_order(problem, known.schedule), search.clock()
        order, _ = lower_peak(posed, schedule.order, repair_clock)
        schedule = Schedule(tuple(take_back(posed, order, repair_clock)))
        evaluation = posed.evaluate(schedule)
        if evaluation.peak_bytes <= problem.budget_bytes:
            schedule = renumbered(schedule, order_of(known.schedule))
            lowered = Solution.simulated(evaluation, schedule, known.solver)
    try:
        found = solved_in_best_order(problem, search, partial(_solved, clock=clock))
    except InfeasibleBudgetError as error:
        if lowered is not None:
            return lowered
        if known is None or not _goes_lower(problem, search, error):
            raise
        return solved_in_best_order(problem, longer, partial(_solved, clock=longer.clock()))
    return found if lowered is None else cheaper(found, lowered)


def _or_from_below(problem: Problem, search: Search, solve: Callable[[], Solution]) -> Solution:
    """Solve; if that fails, solve once more where the lowest peak that a search finds keeps the budget."""
    try:
        return solve()
    except InfeasibleBudgetError as error:
        if error.is_proven or not _goes_lower(problem, search, error):
            raise
    return solve()


def _goes_lower(problem: Problem, search: Search, error: InfeasibleBudgetError) -> bool:
    """Search for the plan of the lowest peak and nothing else, and keep it; return whether it keeps the budget.

    Beside the proof, and in its share of the time, a search may not get there: a ViT-L of 3,500 images was refused
    24.5 GB after 3 s, though this search keeps them after 1.2. If it does not, the error names that plan.
    """
    alone, may_learn = replace(problem, host=None), search.solver == AutoSolver.name and not search.deterministic
    if not may_learn or problem.decisions.moves or not lowest_known.applies_to(alone):
        return False
    lowest = lowest_known.lower(alone, AutoSolver().lowest(alone, effort=search, progress=search.progress))
    found = alone.evaluate(lowest)
    peak_bytes = found.peak_bytes + problem.graph.total_static_bytes
    if peak_bytes < error.minimum_feasible_peak_bytes:
        error.minimum_feasible_peak_bytes, error.lowest = peak_bytes, lowest
        error.operation = problem.graph.operations[lowest.order[found.peak_position]].name
    return found.peak_bytes <= problem.budget_bytes


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


def _solved(problem: Problem, search: Search, clock: Clock, known: Schedule | None = None) -> Solution:
    """Return the cached solution, or search for one for what is left of all the time, and cache it."""
    if problem.decisions.moves:
        return solved_by_policy(problem, lambda asked: _solved(asked, search, clock))
    if problem.regions is not None:  # what is kept does not say which regions were chosen
        return solved(problem, search.solver, effort=search, progress=search.progress)
    key = solution_cache.key_of(problem, search.solver, search)
    found = solution_cache.find(problem, key)
    if found is None:
        left_seconds = max(clock.left(), _LEAST_SHARE * search.time_limit_seconds)
        found = _searched(problem, search if search.deterministic else search.within(left_seconds), known)
        # Without the kernels of annealing the next search may find more.
        is_final = found.is_optimal or search.solver != AutoSolver.name or is_compiled()
        solution_cache.keep(key, found, on_disk=is_final)
    return found


def _searched(problem: Problem, search: Search, known: Schedule | None) -> Solution:
    """Search for a solution, starting from a known plan, or the one of the lowest peak, if it keeps the budget.

    Without it a budget that one search found feasible could be refused by the next.
    """
    known = known or lowest_plan_known(problem, search)
    solver = AutoSolver(known) if search.solver == AutoSolver.name else search.solver
    try:
        return solved(problem, solver, effort=search, progress=search.progress)
    except InfeasibleBudgetError as failure:
        error = failure if search.solver == AutoSolver.name else with_known_minimum(problem, failure)
        if search.deterministic or not lowest_known.applies_to(problem):
            raise error from None
        lowest = known if error.lowest is None else lowest_known.lower(problem, error.lowest)
        if lowest is None:
            raise error from None
        incumbent = Incumbent(problem)
        incumbent.raise_bound(error.lower_bound_seconds)
        incumbent.see(lowest)
        raise incumbent.infeasible(proven=error.is_proven) from error
