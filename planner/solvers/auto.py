"""Try the quick answer and the good one, and give the better with the best proven bound."""

from __future__ import annotations

import time
from dataclasses import replace

from planner import solvers
from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.floor import lowest_schedule
from planner.problem import Problem, Progress, Solution
from planner.schedule import Schedule
from planner.simulate import simulate


class AutoSolver:
    """Whatever does best on this problem."""

    name = "auto"
    summary = "keep everything if it fits, else the best of the other solvers"
    proves_bound = True

    order = ("sqrt", "ilp")

    def solve(self, problem: Problem, *, time_limit_seconds: float, progress: Progress | None = None) -> Solution:
        """Run the solvers one after the other within the time limit."""
        started = time.perf_counter()
        baseline = problem.baseline
        if baseline.peak_bytes <= problem.budget_bytes:
            return Solution(
                solver=self.name,
                schedule=Schedule.keep_all(problem.graph),
                peak_bytes=baseline.peak_bytes,
                recompute_seconds=0.0,
            )
        found: list[Solution] = []
        failures: list[InfeasibleBudgetError] = []
        for name in self.order:
            left = max(time_limit_seconds - (time.perf_counter() - started), 0.1)
            try:
                found.append(solvers.get(name).solve(problem, time_limit_seconds=left, progress=progress))
            except InfeasibleBudgetError as error:
                failures.append(error)
            except SolverUnavailableError as error:
                if progress:
                    progress(f"auto: {error}")
        if not found:
            found.append(self._last_resort(problem, failures))
        best = min(found, key=lambda solution: (solution.recompute_seconds, solution.peak_bytes))
        bound = max(solution.lower_bound_seconds for solution in found)
        return replace(best, lower_bound_seconds=min(bound, best.recompute_seconds))

    def _last_resort(self, problem: Problem, failures: list[InfeasibleBudgetError]) -> Solution:
        """Give the schedule of the lowest peak that is known, if that is low enough."""
        schedule = lowest_schedule(problem.graph, problem.costs, target_bytes=problem.budget_bytes)
        evaluation = simulate(problem.graph, problem.costs, schedule)
        if evaluation.peak_bytes > problem.budget_bytes:
            raise min(failures, key=lambda error: error.minimum_feasible_peak_bytes)
        return Solution(
            solver=self.name,
            schedule=schedule,
            peak_bytes=evaluation.peak_bytes,
            recompute_seconds=evaluation.recompute_seconds,
        )


SOLVER = AutoSolver()
