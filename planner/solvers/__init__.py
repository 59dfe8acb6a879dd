"""The solvers, found by their files.

Every public module of this package defines one ``SOLVER``; dropping a file in is all it takes to
add one. A solver only proposes: :func:`solve` holds each claim against the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Protocol, runtime_checkable

from planner.common.limits import SolveLimits
from planner.common.registry import defined, unknown
from planner.errors import HostBudgetError, InfeasibleBudgetError, UsageError
from planner.ir.problem import Problem, Progress, Solution, confirm
from planner.ir.schedule import recompute_in_regions
from planner.ir.simulator import simulate
from planner.solving.incumbent import Incumbent
from planner.solving.modules.ilp import cheapest
from planner.solving.peak_bounds import minimum_peak

_REGION_ATTEMPTS = 6
"""How often less is asked for, where recomputing inside regions raises the peak."""


@runtime_checkable
class Solver(Protocol):
    """Protocol of a solver module's ``SOLVER``, which decides on whole graphs."""

    name: str
    """The name that users type."""
    summary: str
    """One line on what it does."""
    offloads: bool
    """Whether it can offload values where the problem has a host."""

    def solve(self, problem: Problem, *, effort: SolveLimits, progress: Progress | None = None) -> Solution:
        """Propose a schedule within the budget; raise InfeasibleBudgetError if none was found."""


@cache
def _solvers() -> dict[str, Solver]:
    return defined(__name__, __path__, "SOLVER", Solver)  # type: ignore[type-abstract]


def names() -> tuple[str, ...]:
    """Return the names of all solvers, sorted."""
    return tuple(_solvers())


def get(name: str) -> Solver:
    """Return a solver by its name; raise UsageError if there is none."""
    if name in names():
        return _solvers()[name]
    raise unknown("solver", name, names())


def check_for_regions(*chosen: str) -> None:
    """Refuse solvers of whole graphs, by a UsageError, where modules are chosen."""
    if others := [name for name in chosen if name != "auto"]:
        raise UsageError(
            f"{others[0]!r} decides on a whole graph, and the runtime 'modules' chooses modules by a programme of its "
            "own: leave it out, or use the runtime 'graph'"
        )


def _solver_for(problem: Problem, solver: str | Solver) -> Solver:
    """Return the solver that is asked for, if it can do what the problem asks."""
    chosen = get(solver) if isinstance(solver, str) else solver
    if problem.regions is not None:
        check_for_regions(chosen.name)
    elif problem.host is not None and not chosen.offloads:
        able = ", ".join(repr(name) for name in names() if get(name).offloads)
        raise UsageError(f"solver {chosen.name!r} does not offload; those that do are {able}")
    return chosen


def solve(
    problem: Problem,
    solver: str = "auto",
    *,
    time_limit_seconds: float = 30.0,
    deterministic: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Solution:
    """Solve a problem and confirm the claim by simulation.

    Parameters
    ----------
    problem : Problem
    solver : str
        One of :func:`names`.
    time_limit_seconds : float
        Roughly when to stop improving.
    deterministic : bool
        Count work instead of seconds: the same plan every time, see :class:`planner.common.limits.SolveLimits`.
    seed : int
        Seed of random choices.
    progress : callable, optional
        Called with short lines on the progress.

    Returns
    -------
    Solution
        Its peak, time and budget agree with :func:`planner.ir.simulator.simulate`.

    Raises
    ------
    InfeasibleBudgetError
        If no plan within the budget was found, with the smallest peak known to be possible.
    ClaimMismatchError
        If the solver has a bug.
    UsageError
        If there is no such solver, it cannot do what the problem asks, or the time limit is not positive.

    Examples
    --------
    Three operations forward, one for the loss, three backward, each with one result of 4 bytes.
    Operation 1 takes 9 seconds, the others one second each.

    >>> from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
    >>> reads = [(), (0,), (1,), (2,), (3, 1), (4, 0), (5,)]
    >>> phases = [Phase.FORWARD] * 3 + [Phase.LOSS] + [Phase.BACKWARD] * 3
    >>> graph = TrainingGraph(
    ...     operations=tuple(
    ...         Operation(name=f"o{i}", key=f"o{i}", target="", inputs=inputs, outputs=(i,), phase=phases[i])
    ...         for i, inputs in enumerate(reads)
    ...     ),
    ...     values=tuple(Value(name=f"v{i}", size_bytes=4) for i in range(len(reads))),
    ... )
    >>> costs = tuple(OperationCost(seconds=9.0 if i == 1 else 1.0) for i in range(len(reads)))
    >>> problem = Problem(graph=graph, costs=costs, budget_bytes=12)
    >>> problem.baseline.peak_bytes
    16
    >>> solution = solve(problem)
    >>> solution.schedule.order
    (0, 1, 2, 3, 4, 0, 5, 6)
    >>> solution.peak_bytes, solution.recompute_seconds, solution.is_optimal
    (12, 1.0, True)
    """
    effort = SolveLimits(time_limit_seconds=time_limit_seconds, deterministic=deterministic, seed=seed)
    try:
        return solved(problem, solver, effort=effort, progress=progress)
    except InfeasibleBudgetError as error:
        raise with_known_minimum(problem, error) from None


def solved(
    problem: Problem, solver: str | Solver, *, effort: SolveLimits, progress: Progress | None = None
) -> Solution:
    """Solve a problem within given limits, by a solver or its name; see :func:`solve`.

    The error for a budget says what the solver knows, and no more: see :func:`with_known_minimum`.
    """
    chosen = _solver_for(problem, solver)
    started = time.perf_counter()
    if problem.regions is not None:  # what recomputes or keeps anything else is no plan there
        solution = cheapest(problem, problem.regions, effort.clock(), progress)
    else:
        solution = solve_in_regions(problem, lambda asked: chosen.solve(asked, effort=effort, progress=progress))
    solve_seconds = time.perf_counter() - started
    found = confirm(problem, solution)
    return replace(
        solution,
        solve_seconds=solve_seconds,
        recompute_seconds=found.recompute_seconds,
        stall_seconds=found.stall_seconds,
    )


def with_known_minimum(problem: Problem, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
    """Let the error name the smallest peak that any quick solver can reach, and say that no plan exists if none does.

    The solver that gave up may know of neither. The proof may take seconds, so it is for the last error alone: near the
    floor of a ViT-B two trials were proven to fail, for 15 s, on the way to a plan.
    """
    if problem.regions is not None or isinstance(error, HostBudgetError):
        return error
    floor = minimum_peak(problem.graph, problem.costs)
    incumbent = Incumbent(problem)
    incumbent.raise_bound(error.lower_bound_seconds)
    for schedule in (floor.schedule, error.lowest):
        if schedule is not None:
            incumbent.see(schedule)
    proves = problem.host is None and floor.proven_peak_bytes > problem.budget_bytes and not error.is_proven
    budget = f" {problem.budget_bytes + problem.graph.total_static_bytes} bytes"
    verdict = "" if proves else str(error).partition(";")[0].removesuffix(budget)
    known = incumbent.infeasible(what=verdict, proven=proves or error.is_proven)
    return known if proves or known.minimum_feasible_peak_bytes < error.minimum_feasible_peak_bytes else error


def solve_in_regions(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
    """Solve a problem with every recomputation inside its region.

    Solvers know no regions, and seldom need to: a value is recomputed right before it is read, by an
    operation of the same region. Where that is not so, putting recomputations off can raise the peak;
    then less is asked for. The lower bound is that of the problem as it was first posed.
    """
    solution = solve(problem)
    if not problem.graph.has_units:
        return solution
    bound_seconds, asked = solution.lower_bound_seconds, problem
    for _ in range(_REGION_ATTEMPTS):
        if solution.schedule.offloads:  # which was put so when it was found
            return replace(solution, lower_bound_seconds=min(bound_seconds, solution.added_seconds))
        schedule = recompute_in_regions(problem.graph, solution.schedule)
        evaluation = simulate(problem.graph, problem.costs, schedule)
        excess_bytes = evaluation.peak_bytes - problem.budget_bytes
        if excess_bytes <= 0:
            return Solution.simulated(evaluation, schedule, solution.solver, lower_bound_seconds=bound_seconds)
        asked = replace(asked, budget_bytes=asked.budget_bytes - excess_bytes)
        solution = solve(asked)
    incumbent = Incumbent(problem)
    incumbent.see(schedule)
    raise incumbent.infeasible(what="no plan was found whose recomputations stay inside their blocks, within")
