"""Try the quick answer and the good ones, and give the best with the best proven bound.

The integer programme goes first, alone: it nearly always closes the gap at once. Where it has not
after a moment, annealing starts from scratch in a second thread (neither the kernels nor HiGHS hold
the interpreter's lock), and at the end goes on from the best plan of either until time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Protocol

from planner import solvers
from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.floor import lowest_schedule
from planner.problem import Problem, Progress, Solution
from planner.schedule import Schedule
from planner.simulate import simulate

_CLOSED, _ENOUGH = 1e-4, 3e-4
"""Gap, as a share of the step, at which a search that goes on stops, and one is not worth starting."""

_PROOF_SHARE = 0.6
"""Share of the time that the integer programme may take where annealing goes on after it."""

_HEAD_START_SECONDS, _HEAD_START_SHARE = 2.0, 0.2
"""How long the integer programme runs alone: so long, but no more than this share of the time."""


class Improver(Protocol):
    """What ``auto`` asks of the solver that goes on from a plan."""

    def require(self) -> None:
        """Raise SolverUnavailableError if what it stands on is not installed."""
        ...

    def improve(
        self,
        problem: Problem,
        incumbent: Schedule | None,
        *,
        time_limit_seconds: float,
        enough_seconds: float = 0.0,
        is_over: Callable[[], bool] = ...,
        progress: Progress | None = None,
    ) -> Solution:
        """Give a plan no worse than the incumbent."""
        ...


class AutoSolver:
    """Whatever does best on this problem."""

    name = "auto"
    summary = "keep everything if it fits, else the best of the other solvers"
    proves_bound = True

    quick = "sqrt"
    prover = "ilp"
    improver = "search"

    def solve(self, problem: Problem, *, time_limit_seconds: float, progress: Progress | None = None) -> Solution:
        """Run the solvers within the time limit, until the gap between the best plan and the best bound is closed."""
        baseline = problem.baseline
        if baseline.peak_bytes <= problem.budget_bytes:
            return Solution(
                solver=self.name,
                schedule=Schedule.keep_all(problem.graph),
                peak_bytes=baseline.peak_bytes,
                recompute_seconds=0.0,
            )
        return _Race(problem, time_limit_seconds, progress or (lambda line: None)).run()


class _Race:
    """One solve: what was found, what is proven, and how much time is left."""

    def __init__(self, problem: Problem, time_limit_seconds: float, progress: Progress) -> None:
        self.problem = problem
        self.tell = progress
        self.time_limit_seconds = time_limit_seconds
        self.started = time.perf_counter()
        self.found: list[Solution] = []
        self.failures: list[InfeasibleBudgetError] = []
        self.improver: Improver = solvers.get(AutoSolver.improver)  # type: ignore[assignment]
        self.missing: SolverUnavailableError | None = None
        try:
            self.improver.require()
        except SolverUnavailableError as error:
            self.missing = error

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the time limit is used up, a tenth at least."""
        return max(self.started + share * self.time_limit_seconds - time.perf_counter(), 0.1)

    def run(self) -> Solution:
        self.attempt(AutoSolver.quick)
        if self.missing:
            self.attempt(AutoSolver.prover)
            if self.is_open(_ENOUGH):
                self.tell(f"auto: {self.missing}; going without")
        else:
            self.race()
            if self.is_open(_ENOUGH) and self.left() > 0.1:
                self.go_on()
        if not self.found:
            self.found.append(self.last_resort())
        return replace(self.best(), lower_bound_seconds=min(self.bound_seconds(), self.best().recompute_seconds))

    def race(self) -> None:
        """Run the integer programme and, once it has had its head start, annealing from scratch beside it."""
        stop = Event()

        def anneal() -> Solution | None:
            head_start_seconds = min(_HEAD_START_SECONDS, _HEAD_START_SHARE * self.time_limit_seconds)
            if stop.wait(head_start_seconds):
                return None
            left = self.left()
            return self.improver.improve(self.problem, None, time_limit_seconds=left, is_over=stop.is_set)

        with ThreadPoolExecutor(max_workers=1) as pool:
            beside = pool.submit(anneal)
            try:
                self.attempt(AutoSolver.prover, share=_PROOF_SHARE)
            finally:
                stop.set()
            try:
                annealed = beside.result()
            except InfeasibleBudgetError:
                annealed = None
        if annealed:
            self.found.append(annealed)
            self.report(AutoSolver.improver)

    def go_on(self) -> None:
        """Anneal from the best plan until time is up."""
        incumbent = self.best().schedule if self.found else None
        enough = self.bound_seconds() + _CLOSED * self.problem.baseline.seconds
        try:
            improved = self.improver.improve(
                self.problem, incumbent, time_limit_seconds=self.left(), enough_seconds=enough, progress=self.tell
            )
        except InfeasibleBudgetError as error:
            self.failures.append(error)
        else:
            self.found.append(improved)
            self.report(AutoSolver.improver)

    def attempt(self, name: str, *, share: float = 1.0) -> None:
        """Run one solver and keep what comes of it."""
        try:
            left = self.left(share)
            self.found.append(solvers.get(name).solve(self.problem, time_limit_seconds=left, progress=self.tell))
        except InfeasibleBudgetError as error:
            self.failures.append(error)
        except SolverUnavailableError as error:
            self.tell(f"auto: {error}")
        else:
            self.report(name)

    def best(self) -> Solution:
        return min(self.found, key=lambda solution: (solution.recompute_seconds, solution.peak_bytes))

    def bound_seconds(self) -> float:
        return max((solution.lower_bound_seconds for solution in self.found), default=0.0)

    def is_open(self, share: float) -> bool:
        """Say whether the gap is more than a share of the step, and a plan not known to be impossible."""
        if not self.found:
            return not any(str(error).startswith("no plan") for error in self.failures)
        slack = self.best().recompute_seconds - self.bound_seconds()
        return slack > share * self.problem.baseline.seconds

    def report(self, name: str) -> None:
        """Tell how it stands after a solver."""
        step = self.problem.baseline.seconds
        best, bound = self.best().recompute_seconds / step, self.bound_seconds() / step
        self.tell(f"auto: after {name}: overhead {best:.2%}, bound {bound:.2%}, gap {best - bound:.2%}")

    def last_resort(self) -> Solution:
        """Give the schedule of the lowest peak that is known, if that is low enough."""
        problem = self.problem
        schedule = lowest_schedule(problem.graph, problem.costs, target_bytes=problem.budget_bytes)
        evaluation = simulate(problem.graph, problem.costs, schedule)
        if evaluation.peak_bytes > problem.budget_bytes:
            raise min(self.failures, key=lambda error: error.minimum_feasible_peak_bytes)
        return Solution(
            solver=AutoSolver.name,
            schedule=schedule,
            peak_bytes=evaluation.peak_bytes,
            recompute_seconds=evaluation.recompute_seconds,
        )


SOLVER = AutoSolver()
