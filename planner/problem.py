"""What a solver is given and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from planner.errors import ClaimMismatchError, UsageError
from planner.graph import OperationCost, TrainingGraph
from planner.schedule import Schedule
from planner.simulate import Evaluation, simulate

Progress = Callable[[str], None]
"""Called by a solver with a short line on how it stands."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph, what its operations cost, and the bytes that the step may allocate.

    Parameters
    ----------
    graph : TrainingGraph
    costs : tuple of OperationCost
        One for each operation.
    budget_bytes : int
        Bound on the simulated peak, above what is resident before the step.
    """

    graph: TrainingGraph
    costs: tuple[OperationCost, ...]
    budget_bytes: int

    def __post_init__(self) -> None:
        if len(self.costs) != len(self.graph.operations):
            raise UsageError(f"{len(self.costs)} costs for {len(self.graph.operations)} operations")

    @cached_property
    def baseline(self) -> Evaluation:
        """The step without any recompute."""
        return simulate(self.graph, self.costs, Schedule.keep_all(self.graph))


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A solver's proposal and its claim about it.

    Parameters
    ----------
    solver : str
        Name of the solver.
    schedule : Schedule
    peak_bytes : int
        Claimed peak.
    recompute_seconds : float
        Claimed time of all recomputations.
    lower_bound_seconds : float
        Proven: no plan within the budget, in this base order, recomputes for less time. 0 proves nothing.
    solve_seconds : float
        Time spent solving.
    """

    solver: str
    schedule: Schedule
    peak_bytes: int
    recompute_seconds: float
    lower_bound_seconds: float = 0.0
    solve_seconds: float = 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether the claim equals the proven bound, to the simulator's resolution (1 part in 10**9)."""
        slack = self.recompute_seconds - self.lower_bound_seconds
        return slack <= 1e-9 * max(self.recompute_seconds, 1e-12)


def confirm(problem: Problem, solution: Solution) -> Evaluation:
    """Simulate a solution and hold its claim against what comes out.

    Raises
    ------
    ClaimMismatchError
        If peak, time or bound are not what was claimed, or the budget is broken.
    """
    evaluation = simulate(problem.graph, problem.costs, solution.schedule)
    tolerance = 1e-9 * max(evaluation.seconds, 1e-12)
    wrong = None
    if evaluation.peak_bytes != solution.peak_bytes:
        wrong = f"a peak of {solution.peak_bytes} bytes, simulated are {evaluation.peak_bytes}"
    elif abs(evaluation.recompute_seconds - solution.recompute_seconds) > tolerance:
        wrong = f"{solution.recompute_seconds} s of recompute, simulated are {evaluation.recompute_seconds}"
    elif evaluation.peak_bytes > problem.budget_bytes:
        wrong = f"to keep {problem.budget_bytes} bytes, simulated are {evaluation.peak_bytes}"
    elif solution.lower_bound_seconds > evaluation.recompute_seconds + tolerance:
        wrong = f"a lower bound of {solution.lower_bound_seconds} s above its own {evaluation.recompute_seconds}"
    if wrong:
        raise ClaimMismatchError(f"solver {solution.solver!r} claims {wrong}; please report this as a bug")
    return evaluation
