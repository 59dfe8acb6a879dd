"""Plans whose blocks keep a budget: an allocator's blocks are larger than what it is asked for.

By how much is known only when a plan is simulated, so the step is solved for less until the blocks fit. Regular plans,
which recompute equal segments one after the other, leave smaller gaps between blocks than the cheapest plans do. If
the latter do not fit, or only at a price, regular plans are tried too, and reruns are taken back as long as blocks fit.
(A Llama of eight layers at the lowest peak of any plan: the blocks of the cheapest plan need 25 MiB more than the
budget; a plan that costs 0.3% of the step fits.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.common.limits import Clock
from planner.errors import InfeasibleBudgetError
from planner.ir.order import in_own_order, order_of, renumbered
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.ir.static_memory import StaticMemory
from planner.plans.allocator import whole_peak_bytes
from planner.solving.exchange import exchanged
from planner.solving.repair import take_back
from planner.solving.segmentations import segmentations

ATTEMPTS = 6
"""How often a step is solved for less; most plans whose blocks break a budget need one."""

_STEEP = 0.005
"""What it may cost, as a share of the step, to be solved for less, before regular plans are tried."""

_SECONDS_PER_RUN = 2e-5
"""About what it takes to see the blocks of a plan, for each of its runs, where work is counted and not time."""

InBlocks = tuple[int, Solution]
"""A solution, and what its blocks need of the whole device in bytes."""


def solved_in_blocks(
    problem: Problem,
    static_memory: StaticMemory,
    solve: Callable[[Problem], Solution],
    known: Callable[[], Schedule | None] = lambda: None,
    clock: Callable[[], Clock] = lambda: Clock(0.0),
) -> Solution:
    """Solve a problem so that the allocator's blocks keep the budget; bounds stay valid.

    ``known`` gives a schedule that is taken where none of the solver's does: blocks of two with the same peak differ.
    ``clock`` starts the time that regular plans may take. An InfeasibleBudgetError says that no such plan was found,
    with the smallest budget that the blocks of one keep.
    """
    budget_bytes = problem.budget_bytes + problem.graph.total_static_bytes

    def in_blocks(schedule: Schedule, solver: str) -> InBlocks:
        solution = Solution.simulated(problem.evaluate(schedule), schedule, solver)
        return whole_peak_bytes(problem, schedule, static_memory), solution

    first = solution = solve(problem)
    seen: list[InBlocks] = []
    for attempt in range(ATTEMPTS + 1):
        needed_bytes = whole_peak_bytes(problem, solution.schedule, static_memory)
        seen.append((needed_bytes, solution))
        if needed_bytes <= budget_bytes:
            break
        tighter_bytes = solution.peak_bytes - 2**attempt * (needed_bytes - budget_bytes)
        try:
            solution = solve(replace(problem, budget_bytes=tighter_bytes))
        except InfeasibleBudgetError as error:
            if error.lowest is not None and problem.host is None and problem.regions is None:
                seen.append(in_blocks(error.lowest, first.solver))
            break
    if _cheapest(seen, budget_bytes) is None and (schedule := known()) is not None:
        seen.append(in_blocks(schedule, first.solver))
    best = _cheapest(seen, budget_bytes)
    is_steep = best is None or best.added_seconds - first.added_seconds > _STEEP * problem.baseline.seconds
    if is_steep and problem.regions is None and not problem.decisions.moves:
        seen.extend(_regular(problem, seen, budget_bytes, lambda schedule: in_blocks(schedule, "sqrt"), clock()))
        best = _cheapest(seen, budget_bytes)
    if best is not None:
        return bounded_by(first, best)
    least_bytes, least = min(seen, key=lambda one: one[0])
    at = problem.evaluate(least.schedule).peak_position
    raise InfeasibleBudgetError(
        "the allocator's blocks break the budget",
        minimum_feasible_peak_bytes=least_bytes,
        operation=problem.graph.operations[least.schedule.order[at]].name,
        lower_bound_seconds=first.lower_bound_seconds,
        lowest=least.schedule,
    )


def exchanged_in_blocks(problem: Problem, static_memory: StaticMemory, start: Solution, clock: Clock) -> Solution:
    """Return a solution that keeps or fetches what another recomputes, as far as blocks then keep the budget."""
    budget_bytes = problem.budget_bytes + problem.graph.total_static_bytes
    (posed, schedule), order = in_own_order(problem, start.schedule), order_of(start.schedule)

    def fits(tried: Schedule) -> bool:
        clock.work(_SECONDS_PER_RUN * len(tried.order))
        return whole_peak_bytes(problem, renumbered(tried, order), static_memory) <= budget_bytes

    schedule = exchanged(posed, schedule, clock, fits)
    return Solution.simulated(posed.evaluate(schedule), renumbered(schedule, order), start.solver)


def cheaper(one: Solution, other: Solution) -> Solution:
    """Return the cheaper of two solutions of a problem; one that has no bound of its own gets that of the first."""
    best = min(one, other, key=lambda solution: solution.added_seconds)
    return best if best.lower_bound_seconds else bounded_by(one, best)


def bounded_by(first: Solution, solution: Solution) -> Solution:
    """Return a solution with the bound of the budget itself: a smaller budget may have a larger one."""
    return replace(solution, lower_bound_seconds=min(first.lower_bound_seconds, solution.added_seconds))


def _cheapest(seen: list[InBlocks], budget_bytes: int) -> Solution | None:
    fit = [solution for needed_bytes, solution in seen if needed_bytes <= budget_bytes]
    return min(fit, key=lambda solution: solution.added_seconds, default=None)


def _regular(
    problem: Problem, seen: list[InBlocks], budget_bytes: int, in_blocks: Callable[[Schedule], InBlocks], clock: Clock
) -> Iterator[InBlocks]:
    """Yield segmented plans that need less or cost less than all before, and the cheapest with reruns taken back."""
    least_bytes, best = min(needed_bytes for needed_bytes, _ in seen), _cheapest(seen, budget_bytes)
    for schedule in segmentations(problem.graph):
        if clock.left() < 0 and best is not None:
            break
        clock.work(_SECONDS_PER_RUN * len(schedule.order))
        found = problem.evaluate(schedule)
        most_bytes = budget_bytes if best is not None else least_bytes
        is_dearer = best is not None and found.added_seconds >= best.added_seconds
        if is_dearer or found.peak_bytes + problem.graph.total_static_bytes > most_bytes:
            continue
        needed_bytes, solution = in_blocks(schedule)
        least_bytes = min(least_bytes, needed_bytes)
        if needed_bytes <= budget_bytes:
            best = solution
        yield needed_bytes, solution
    if best is not None and not best.schedule.offloads:
        fewer = take_back(problem, best.schedule.order, clock, lambda schedule: in_blocks(schedule)[0] <= budget_bytes)
        yield in_blocks(Schedule(tuple(fewer)))
