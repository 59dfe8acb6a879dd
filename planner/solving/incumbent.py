"""The incumbent of a solve: the best plan and the best proven bound, whoever found them, safe between threads."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock

from planner.errors import InfeasibleBudgetError
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation

_WORTH_TELLING = 1e-3
"""Change of plan or bound, as a share of the step, that people are told of."""


class Incumbent:
    """The best plan and the best bound of one problem; ``progress`` is called when either improves."""

    def __init__(self, problem: Problem, progress: Progress | None = None) -> None:
        self.problem = problem
        self.schedule: Schedule | None = None
        """The cheapest plan within the budget."""
        self.evaluation = replace(problem.baseline, recompute_seconds=float("inf"))
        """Of that plan; without one, of the step as it is, at infinite cost. Set at once: other threads read it."""
        self.solver = ""
        """Who found it."""
        self.lower_bound_seconds = 0.0
        """Proven: no plan in the base order costs less."""
        self.lowest, self._lowest_evaluation = Schedule.keep_all(problem.graph), problem.baseline
        """The plan of the lowest peak of any seen, within the budget or not."""
        self._lock = Lock()
        self._progress = progress
        self._told = (float("inf"), 0.0)

    @property
    def added_seconds(self) -> float:
        """Seconds that the best plan adds, by recompute and by waiting; infinite if there is none."""
        return self.evaluation.added_seconds

    def update(self, schedule: Schedule, solver: str) -> bool:
        """Simulate a plan, keep it if it is the best, and return whether it keeps the budget."""
        evaluation = self.problem.evaluate(schedule)
        fits = evaluation.peak_bytes <= self.problem.budget_bytes
        with self._lock:
            best = self.evaluation
            self._see(schedule, evaluation)
            if fits and (evaluation.added_seconds, evaluation.peak_bytes) < (best.added_seconds, best.peak_bytes):
                self.schedule, self.solver, self.evaluation = schedule, solver, evaluation
                self._tell()
        return fits

    def see(self, schedule: Schedule) -> None:
        """Remember a plan for its low peak, without making it the incumbent."""
        evaluation = self.problem.evaluate(schedule)
        with self._lock:
            self._see(schedule, evaluation)

    def take_lowest(self, solver: str) -> bool:
        """Make the plan of the lowest peak seen the incumbent if there is none; return whether it keeps the budget."""
        return self.schedule is None and self.update(self.lowest, solver)

    def raise_bound(self, lower_bound_seconds: float) -> None:
        """Raise the proven bound."""
        with self._lock:
            if lower_bound_seconds > self.lower_bound_seconds:
                self.lower_bound_seconds = lower_bound_seconds
                self._tell()

    def is_closed(self, gap_seconds: float) -> bool:
        """Whether the gap between plan and bound is within a tolerance."""
        slack = self.added_seconds - self.lower_bound_seconds
        return self.schedule is not None and slack <= max(gap_seconds, 1e-9 * self.added_seconds)

    def _see(self, schedule: Schedule, evaluation: Evaluation) -> None:
        if evaluation.peak_bytes < self._lowest_evaluation.peak_bytes:
            self.lowest, self._lowest_evaluation = schedule, evaluation

    def _tell(self) -> None:
        if self._progress is None or self.schedule is None:
            return
        step = self.problem.baseline.seconds or 1.0
        now = (self.added_seconds / step, self.lower_bound_seconds / step)
        if max(abs(old - new) for old, new in zip(self._told, now, strict=True)) < _WORTH_TELLING:
            return
        self._told = now
        self._progress(f"best plan adds {now[0]:.2%} to the step (by {self.solver}), any plan at least {now[1]:.2%}")

    def solution(self, *, what: str = "") -> Solution:
        """Return the best plan as a claim, or raise the error of :meth:`infeasible` if there is none."""
        if self.schedule is None:
            raise self.infeasible(what=what)
        bound_seconds = self.lower_bound_seconds
        return Solution.simulated(self.evaluation, self.schedule, self.solver, lower_bound_seconds=bound_seconds)

    def infeasible(self, *, what: str = "", proven: bool = False) -> InfeasibleBudgetError:
        """Return the error that no plan keeps the budget, or that none was found."""
        graph, static_bytes = self.problem.graph, self.problem.graph.total_static_bytes
        operation = graph.operations[self.lowest.order[self._lowest_evaluation.peak_position]].name
        known_bytes = self._lowest_evaluation.peak_bytes + static_bytes
        how = what or ("no plan keeps" if proven else "found no plan that keeps")
        return InfeasibleBudgetError(
            f"{how} {self.problem.budget_bytes + static_bytes} bytes; "
            f"a plan is known for {known_bytes}, at {operation}",
            minimum_feasible_peak_bytes=known_bytes,
            operation=operation,
            is_proven=proven,
            lower_bound_seconds=self.lower_bound_seconds,
            lowest=self.lowest,
        )
