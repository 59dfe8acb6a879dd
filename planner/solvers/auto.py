"""Run the integer programme and annealing side by side; return the best plan with the best proven bound.

The integer programme nearly always closes the gap at once. Beside it, in threads of their own
(neither HiGHS nor the kernels of the annealing hold the interpreter's lock), goes annealing where
the gap is still open after a moment: one for each core that is left, each with other random moves.
All share one incumbent, so that each goes on from the best plan of any. What is quick is asked where
none of them has found a plan. This is the one solver that knows others.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

from cost_models.devices import available_cores
from planner.common.limits import SolveLimits
from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.solvers import ilp, offload_search, search
from planner.solving.incumbent import Incumbent
from planner.solving.peak_bounds import lowest_schedule

_ENOUGH = 3e-4
"""Gap, as a share of the step, at which no search is started and one that goes on stops, where no more is asked."""

_PROOF_SHARE = 0.6
"""Share of the work that the integer programme may take where both go one after the other."""

_HEAD_START_SECONDS, _HEAD_START_SHARE = 2.0, 0.2
"""How long the integer programme runs without annealing: so long, but no more than this share of the time."""

_MOST_BESIDE = 4
"""Annealings beside the integer programme, where there are cores for them."""


class AutoSolver:
    """Race the other solvers; fall back on a ``known`` plan of low peak if none of them finds a cheaper one."""

    name = "auto"
    summary = "keep everything if it fits, else the best of the other solvers"
    offloads = True

    def __init__(self, known: Schedule | None = None) -> None:
        self.known = known

    def solve(self, problem: Problem, *, effort: SolveLimits, progress: Progress | None = None) -> Solution:
        """Run the solvers until the gap between incumbent and bound is closed, or time is up."""
        tell = progress or (lambda line: None)
        incumbent = Incumbent(problem, lambda line: tell(f"auto: {line}"))
        if self.known is not None:
            incumbent.see(self.known)
            if problem.host is not None:
                incumbent.take_lowest(self.name)
        self.improve(incumbent, effort=effort, progress=tell)
        return incumbent.solution()

    def improve(self, incumbent: Incumbent, *, effort: SolveLimits, progress: Progress | None = None) -> None:
        """Improve an incumbent that may hold a neighbour's plan; raise InfeasibleBudgetError if there is none."""
        problem = incumbent.problem
        if problem.host is not None:
            offload_search.SOLVER.improve(incumbent, effort=effort, known=self.known)
            return
        for known in (Schedule.keep_all, Schedule.as_written):
            incumbent.update(known(problem.graph), self.name)
        if incumbent.is_closed(0.0):
            return
        race = _Race(incumbent, effort, progress or (lambda line: None))
        try:
            race.run()
        except InfeasibleBudgetError:
            race.descend()
            raise incumbent.infeasible(proven=True) from None
        if incumbent.schedule is None:
            incumbent.see(lowest_schedule(problem))
            incumbent.take_lowest(self.name)
        if incumbent.schedule is None:
            raise incumbent.infeasible()

    def lowest(self, problem: Problem, *, effort: SolveLimits, progress: Progress | None = None) -> Schedule:
        """Return the plan of the lowest peak that is found by recompute, down to the budget of the problem."""
        incumbent = Incumbent(problem)
        _Race(incumbent, effort, progress or (lambda line: None)).descend()
        return incumbent.lowest


class _Race:
    """State of one solve: the incumbent, and which solvers still run."""

    def __init__(self, incumbent: Incumbent, effort: SolveLimits, tell: Progress) -> None:
        self.incumbent = incumbent
        self.effort = effort
        self.tell = tell
        self.clock = effort.clock()
        self.spent = effort.clock()
        """All that the solvers take; the clock beside it is for sharing out time where none has passed."""
        self.gap_seconds = max(_ENOUGH, effort.enough) * incumbent.problem.baseline.seconds

    def run(self) -> None:
        """Improve the incumbent until time is up; raise InfeasibleBudgetError if there is provably no plan."""
        if self.effort.deterministic:
            self.prove(_PROOF_SHARE)
            self.anneal(Event())
            return
        proven, over = Event(), Event()
        num_beside = min(max(available_cores() - 1, 1), _MOST_BESIDE)
        with ThreadPoolExecutor(max_workers=num_beside) as pool:
            beside = [pool.submit(self.run_beside, proven, over, number) for number in range(num_beside)]
            try:
                self.prove()
            except BaseException:
                over.set()
                raise
            finally:
                proven.set()
            for each in beside:
                each.result()

    def run_beside(self, proven: Event, over: Event, number: int) -> None:
        """After a head start for the proof, anneal until time is up or the gap is closed."""
        proven.wait(min(_HEAD_START_SECONDS, _HEAD_START_SHARE * self.clock.limit_seconds))
        self.anneal(over, proven, number)

    def prove(self, share: float = 1.0) -> None:
        """Run the integer programme; only a proof that no plan exists ends the race."""
        try:
            ilp.SOLVER.prove(self.incumbent, effort=self.rest(share), progress=self.tell)
        except SolverUnavailableError as error:
            self.tell(f"auto: {error}")
        except InfeasibleBudgetError as error:
            if error.is_proven:
                raise

    def anneal(self, over: Event, proven: Event | None = None, number: int = 0) -> None:
        """Anneal until the gap is closed, or time is up; each number means other random moves."""

        def is_over() -> bool:
            may_stop = proven is None or proven.is_set()
            return over.is_set() or (may_stop and self.incumbent.is_closed(self.gap_seconds))

        if not is_over() and self.can_anneal(is_over):
            effort = replace(self.rest(), seed=self.effort.seed + number)
            search.SOLVER.improve(self.incumbent, effort=effort, is_over=is_over)

    def descend(self) -> None:
        """Search for the plan of the lowest peak if the budget cannot be kept."""
        if self.can_anneal(lambda: False):
            search.SOLVER.descend(self.incumbent, effort=self.rest())
        else:
            self.incumbent.update(lowest_schedule(self.incumbent.problem), AutoSolver.name)

    def can_anneal(self, is_over: Callable[[], bool]) -> bool:
        """Wait until the kernels are compiled; False if time was up before, or if they cannot be."""
        try:
            search.SOLVER.require()
        except SolverUnavailableError as error:
            self.tell(f"auto: {error}; going without")
            return False
        return self.effort.deterministic or search.SOLVER.prepare(lambda: is_over() or self.clock.left() < 0, self.tell)

    def rest(self, share: float = 1.0) -> SolveLimits:
        return replace(self.effort, time_limit_seconds=max(self.clock.left(share), 0.1), told=self.spent.work)


SOLVER = AutoSolver()
