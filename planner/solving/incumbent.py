"""How a solve stands: the best plan and the best bound, whoever found them, safe between threads."""

from __future__ import annotations

from threading import Lock

from planner.errors import InfeasibleBudgetError
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule

_WORTH_TELLING = 1e-3
"""Change of plan or bound, as a share of the step, that people are told of."""


class Incumbent:
    """What is known of one problem.

    Parameters
    ----------
    progress : callable, optional
        Told when plan or bound move.

    Attributes
    ----------
    schedule : Schedule or None
        The cheapest plan within the budget.
    solver : str
        Who found it.
    peak_bytes : int
        Its peak.
    lower_bound_seconds : float
        Proven: no plan in the base order costs less.
    lowest_peak_bytes : int
        The lowest peak of any plan seen, within the budget or not, and
    lowest : Schedule
        that plan.
    """

    def __init__(self, problem: Problem, progress: Progress | None = None) -> None:
        self.problem = problem
        self.schedule: Schedule | None = None
        self.solver = ""
        self._recompute_and_stall_seconds = (float("inf"), 0.0)  # set at once: other threads read them
        self.peak_bytes = problem.baseline.peak_bytes
        self.lower_bound_seconds = 0.0
        self.lowest = Schedule.keep_all(problem.graph)
        self.lowest_peak_bytes = problem.baseline.peak_bytes
        self._lock = Lock()
        self._progress = progress
        self._told = (float("inf"), 0.0)

    @property
    def recompute_seconds(self) -> float:
        """Time of the best plan's recomputations; infinite if there is none."""
        return self._recompute_and_stall_seconds[0]

    @property
    def stall_seconds(self) -> float:
        """Time that the best plan waits for transfers."""
        return self._recompute_and_stall_seconds[1]

    @property
    def added_seconds(self) -> float:
        """What the best plan costs: both together."""
        return sum(self._recompute_and_stall_seconds)

    def update(self, schedule: Schedule, solver: str) -> bool:
        """Simulate a plan, take it as the best if it is, and say whether it keeps the budget."""
        problem = self.problem
        evaluation = problem.evaluate(schedule)
        fits = evaluation.peak_bytes <= problem.budget_bytes
        with self._lock:
            if evaluation.peak_bytes < self.lowest_peak_bytes:
                self.lowest, self.lowest_peak_bytes = schedule, evaluation.peak_bytes
            cost = (evaluation.added_seconds, evaluation.peak_bytes)
            if fits and cost < (self.added_seconds, self.peak_bytes):
                self.schedule, self.solver, self.peak_bytes = schedule, solver, evaluation.peak_bytes
                self._recompute_and_stall_seconds = (evaluation.recompute_seconds, evaluation.stall_seconds)
                self._tell()
        return fits

    def raise_bound(self, lower_bound_seconds: float) -> None:
        """Take a proven bound."""
        with self._lock:
            if lower_bound_seconds > self.lower_bound_seconds:
                self.lower_bound_seconds = lower_bound_seconds
                self._tell()

    def is_closed(self, gap_seconds: float) -> bool:
        """Say whether plan and bound are so near each other, or equal to the simulator's resolution."""
        slack = self.added_seconds - self.lower_bound_seconds
        return self.schedule is not None and slack <= max(gap_seconds, 1e-9 * self.added_seconds)

    def _tell(self) -> None:
        if self._progress is None or self.schedule is None:
            return
        step = self.problem.baseline.seconds or 1.0
        now = (self.added_seconds / step, self.lower_bound_seconds / step)
        if max(abs(old - new) for old, new in zip(self._told, now, strict=True)) < _WORTH_TELLING:
            return
        self._told = now
        self._progress(
            f"best {now[0]:.2%} ({self.solver}), bound {now[1]:.2%}, gap {100 * (now[0] - now[1]):.2f} points"
        )

    def solution(self) -> Solution:
        """Return the best plan as a claim; there must be one."""
        assert self.schedule is not None
        recompute_seconds, stall_seconds = self._recompute_and_stall_seconds
        return Solution(
            solver=self.solver,
            schedule=self.schedule,
            peak_bytes=self.peak_bytes,
            recompute_seconds=recompute_seconds,
            stall_seconds=stall_seconds,
            lower_bound_seconds=min(self.lower_bound_seconds, recompute_seconds + stall_seconds),
        )

    def infeasible(self, *, what: str = "", proven: bool = False) -> InfeasibleBudgetError:
        """Return the error that says that no plan keeps the budget, or that none was found."""
        problem, graph = self.problem, self.problem.graph
        evaluation = problem.evaluate(self.lowest)
        operation = graph.operations[self.lowest.order[evaluation.peak_position]].name
        static = graph.total_static_bytes
        how = what or ("no plan keeps" if proven else "found no plan that keeps")
        return InfeasibleBudgetError(
            f"{how} {problem.budget_bytes + static} bytes; "
            f"a plan is known for {evaluation.peak_bytes + static}, at {operation}",
            minimum_feasible_peak_bytes=evaluation.peak_bytes + static,
            operation=operation,
            is_proven=proven,
            lower_bound_seconds=self.lower_bound_seconds,
        )
