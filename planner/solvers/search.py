"""Simulated annealing on the recompute set, for budgets at which the integer programme leaves a gap.

It proves nothing. Some plans are found from nothing, going from hot to cold; then what is made of
two of them, or of one, is annealed, barely warm, and the better ones stay: see
``SolutionPool``. The moves and the exact bytes after each are in ``solving.annealing``,
compiled by numba, which is loaded when a search starts and not before.
"""

from __future__ import annotations

import fcntl
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from planner.common.limits import Clock, SolveLimits
from planner.errors import ClaimMismatchError, SolverUnavailableError
from planner.ir.graph import Operation, OperationCost, TrainingGraph, Value
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.solving.incumbent import Incumbent
from planner.solving.minimum_peak_search import lowest_plan
from planner.solving.peak_bounds import first_run_bytes, lowest_schedule, proven_peak
from planner.solving.rerun_set import RerunSet

_HOT, _WARM, _WARMER, _COLD = 5.0, 0.3, 3.0, 0.003
"""Temperatures: at the start from nothing, at the start from plans, at least and at most, and at the end; in mean costs
of an operation."""

_FAR = 0.02
"""A plan further from the bound, as a share of the step, is none to start from at first: others lie elsewhere."""

_PACE = 1e-3
"""How fast the price of a byte over the budget follows whether the budget is kept: so much a move."""

_ROUND_SHARE, _FEWEST_MOVES, _MOST_MOVES = 1 / 64, 20, 60
"""A round takes about this share of the time; it has no fewer and no more moves for each operation than these."""

_FROM_A_PLAN = 0.6
"""So much shorter is a round that starts from a plan."""

_YOUNG_SHARE = 0.35
"""Share of the time at most until rounds start from any member of a population, even where there are few."""

_FROM_NOTHING = 4
"""Beside a plan that is near the bound, one of so many rounds starts from nothing all the same."""

_DESCENT_SHARE = 0.8
"""Of what is left of the time, at most, for a first plan after a round of annealing that found none."""

_QUICK_SHARE = 0.15
"""Of what is left of the time, at most, for the plan that a descent begins with."""

_LEAST_SECONDS = 0.1

_COMPILES = "compiles its kernels, once for this installation, which takes up to half a minute"


MANY = 12
"""Members at most."""

_ALIKE = 0.03
"""Two are alike that differ in no more than this share of what runs again, and only the cheaper stays."""

_STALE, _EXHAUSTED = 40, 200
"""Sets in a row that were not let in, from which on some begin from nothing again, and until no more is to be had."""


class SearchSolver:
    """Simulated annealing with exact evaluation of every move."""

    name = "search"
    summary = "annealing on recomputations (needs numba): good plans for very tight budgets, no bound"
    offloads = False

    def solve(self, problem: Problem, *, effort: SolveLimits, progress: Progress | None = None) -> Solution:
        """Search from scratch; a SolverUnavailableError says that numba is not installed."""
        incumbent = Incumbent(problem, progress)
        if not incumbent.update(Schedule.keep_all(problem.graph), self.name):
            if progress and not is_compiled():
                progress(f"search: {_COMPILES}")
            self.improve(incumbent, effort=effort)
        if incumbent.schedule is None:
            self.descend(incumbent, effort=effort)
        return incumbent.solution()

    def require(self) -> None:
        """Raise SolverUnavailableError if numba is not installed; import nothing."""
        if find_spec("numba") is None:
            raise SolverUnavailableError("solver 'search' needs numba: pip install checkpoint-planner[search]")

    def missing(self, limits: SolveLimits | None) -> str:
        """Say what a search that anneals only if it can went without, and what to do; ``""`` if nothing was missing."""
        if getattr(limits, "solver", "") != "auto" or (limits is not None and limits.deterministic):
            return ""
        if find_spec("numba") is None:
            return "pip install checkpoint-planner[search]: annealing, which looks for cheaper plans, needs it"
        return "" if is_compiled() else f"plan again: annealing, which looks for cheaper plans, {_COMPILES}"

    def prepare(self, is_over: Callable[[], bool], progress: Progress) -> bool:
        """Compile the kernels without blocking other threads; False if the solve ended before they were ready."""
        if is_compiled():
            return True
        progress(f"search: {_COMPILES}, in a background process")
        process: subprocess.Popen[bytes] | None = None
        while not is_over():
            if is_compiled() or (process is not None and process.poll() is not None):
                return True
            process = process or _compile_beside()
            time.sleep(0.1)
        return False

    def improve(
        self, incumbent: Incumbent, *, effort: SolveLimits, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Anneal from the incumbent that other solvers may improve too; without one, look for a plan of low peak first.

        Now and then it asks whether it is over. A move costs O(runs + reads changed): a few microseconds for 1,000
        operations. The method is that of Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing", Science
        220, 1983.
        """
        problem = incumbent.problem
        if max(first_run_bytes(problem.graph, problem.costs), default=0) > problem.budget_bytes:
            return
        self.require()
        clock = effort.clock()

        def look_lower() -> None:
            if incumbent.take_lowest(self.name):
                return
            if rounds.number == 1:
                self.begin_low(incumbent, _QUICK_SHARE * clock.left())
            before = None
            while incumbent.lowest != before and incumbent.schedule is None and clock.left() > 0 and not is_over():
                before, seconds = incumbent.lowest, max(_DESCENT_SHARE * clock.left(), _LEAST_SECONDS)
                limits = replace(effort, time_limit_seconds=seconds, told=clock.work)
                incumbent.update(self.descent(incumbent, problem.budget_bytes, limits, is_over), self.name)

        rounds = _Rounds(problem, effort.seed)
        rounds.search(incumbent, clock, lambda: is_over() or incumbent.is_closed(0.0), look_lower)

    def descend(self, incumbent: Incumbent, *, effort: SolveLimits) -> None:
        """Search for the plan of the lowest peak, down to the budget, from the lowest that the incumbent has seen."""
        self.require()
        self.begin_low(incumbent, _QUICK_SHARE * effort.time_limit_seconds)
        problem = incumbent.problem
        least_bytes = problem.budget_bytes
        if max(first_run_bytes(problem.graph, problem.costs), default=0) > least_bytes:
            # Then it ends at the proven floor. To prove one took 5 s for a ViT-B that keeps its budget after 0.7.
            least_bytes = proven_peak(problem.graph, problem.costs)[0]
        incumbent.update(self.descent(incumbent, least_bytes, effort), self.name)

    def begin_low(self, incumbent: Incumbent, seconds: float) -> None:
        """Offer the plan of the lowest peak that is found quickly to an incumbent."""
        incumbent.update(lowest_schedule(replace(incumbent.problem, budget_bytes=0), seconds), self.name)

    def descent(
        self, incumbent: Incumbent, least_bytes: int, effort: SolveLimits, is_over: Callable[[], bool] = lambda: False
    ) -> Schedule:
        """Lower the peak from the lowest plan that the incumbent has seen, until one is within the budget."""
        problem = replace(incumbent.problem, budget_bytes=least_bytes)
        return lowest_plan(problem, incumbent.lowest, effort, lambda: is_over() or incumbent.schedule is not None)


def is_compiled() -> bool:
    """Whether numba's cache seems to hold the kernels; a wrong guess costs time only."""
    folder = _cache_folder()
    return folder is None or any(folder.glob("annealing.descend-*.nbi"))


def _cache_folder() -> Path | None:
    """Return the folder of numba's cache; None if numba is not installed."""
    from planner.solving import annealing as kernels

    stats = getattr(kernels.anneal, "stats", None)
    return None if stats is None else Path(stats.cache_path)


def _compile_beside() -> subprocess.Popen[bytes] | None:
    """Compile the kernels in a process of their own, which outlives this one: numba would hold up all threads here.

    There is only one such process at a time, whoever started it; None while another one is at it.
    """
    folder = _cache_folder()
    assert folder is not None, "only what numba compiles is compiled"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "annealing.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        return subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import compile_kernels; compile_kernels()"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(lock.fileno(),),  # the lock is the process's, and goes with it
        )


def compile_kernels() -> None:
    """Compile all kernels by calling them once."""
    problem, effort = smallest(), SolveLimits(deterministic=True)
    SOLVER.solve(problem, effort=effort)
    lowest_plan(problem, Schedule.keep_all(problem.graph), effort)


def smallest() -> Problem:
    """Return the smallest problem that needs a recomputation, to compile all kernels."""
    reads = [(), (0,), (1,), (2, 0)]
    graph = TrainingGraph(
        operations=tuple(
            Operation(name=f"o{i}", key=f"o{i}", target="", inputs=inputs, outputs=(i,))
            for i, inputs in enumerate(reads)
        ),
        values=tuple(Value(name=f"v{i}", size_bytes=size) for i, size in enumerate((2, 4, 4, 2))),
    )
    return Problem(graph=graph, costs=(OperationCost(seconds=1.0),) * len(reads), budget_bytes=9)


class Member(NamedTuple):
    """A recompute set within the budget: its cost in the kernels' unit, and its sorted keys."""

    cost: float
    keys: tuple[int, ...]


class SolutionPool:
    """The cheapest recompute sets found, and which are let in."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.least = math.inf
        """Cost of the cheapest that ever was."""
        self.stale = 0
        """How many sets in a row were not let in."""

    def enter(self, found: Member | None) -> None:
        """Add a member that is cheaper than similar ones, or than the dearest if the pool is full.

        None stands for one that does not keep the budget. O(members x keys).
        """
        self.stale += 1
        if found is None:
            return
        self.least = min(self.least, found.cost)
        less = [member for member in self.members if _are_alike(found, member)]
        if not less and len(self.members) >= MANY:
            less = [max(self.members)]
        if all(found.cost < member.cost * (1 - 1e-9) for member in less):
            self.members = [found, *(member for member in self.members if member not in less)]
            self.stale = 0


def _are_alike(one: Member, other: Member) -> bool:
    different = len(set(one.keys).symmetric_difference(other.keys))
    return math.isclose(one.cost, other.cost) or different <= _ALIKE * min(len(one.keys), len(other.keys))


class _Rounds:
    """Rounds of annealing, from scratch or from the solution pool; each offers its best set to the pool."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        self.reruns = RerunSet(problem, seed)
        self.kernels, self.state, self.random = self.reruns.kernels, self.reruns.state, self.reruns.random
        self.pool = SolutionPool()
        self.far_seconds = _FAR * problem.baseline.seconds
        self.number = 0
        self.is_hard = False
        """Whether the last round from nothing found no plan."""

    def search(
        self, incumbent: Incumbent, clock: Clock, is_over: Callable[[], bool], look_lower: Callable[[], None]
    ) -> None:
        """Anneal until time is up and offer every improvement; search for a lower peak while there is no plan."""
        count = len(self.state.count)
        share = clock.left() / self.reruns.move_seconds / count * _ROUND_SHARE
        moves_each = int(min(max(share, _FEWEST_MOVES), _MOST_MOVES))
        while self.pool.stale < _EXHAUSTED and clock.left() > 0 and not is_over():
            self.adopt(incumbent)
            start, top = self.next_start(incumbent, clock)
            moves = int(moves_each * (_FROM_A_PLAN if start else 1.0))
            self.cool(start, top, moves * count, clock, is_over)
            if not start:
                self.is_hard = math.isinf(self.state.real[self.kernels.BEST])
            self.take_in(incumbent)
            self.number += 1
            if incumbent.schedule is None and clock.left() > 0 and not is_over():
                look_lower()

    def next_start(self, incumbent: Incumbent, clock: Clock) -> tuple[Sequence[int], float]:
        """Return the keys that a round starts from, and its initial temperature.

        Until there are many, or for a share of the time, it starts from nothing, or mostly from the best where that is
        near the bound, or from nothing none is found: plans of another kind are then none to look for. After that from
        any of them; where that brings nothing more for long, some rounds start from nothing again.
        """
        pool, warm = self.pool, self.between(_WARM, _WARMER)
        early = clock.left() > (1 - _YOUNG_SHARE) * clock.limit_seconds
        from_nothing = (self.number + 1) % _FROM_NOTHING == 0
        if len(pool.members) < 2 or (early and len(pool.members) < MANY):
            is_near = incumbent.is_closed(self.far_seconds) or not early or self.is_hard
            if pool.members and is_near and not from_nothing:
                return min(pool.members).keys, _WARM if self.number == 0 else warm
            return (), _HOT
        return ((), _HOT) if pool.stale >= _STALE and from_nothing else (self.random.choice(pool.members).keys, warm)

    def between(self, least: float, most: float) -> float:
        """Draw a number log-uniformly."""
        return float(least * (most / least) ** self.random.random())

    def cool(self, start: Sequence[int], top: float, moves: int, clock: Clock, is_over: Callable[[], bool]) -> None:
        """Anneal from a recompute set for a number of moves."""
        kernels, state = self.kernels, self.state
        self.reruns.reset(start)
        state.real[kernels.BEST], state.best[0] = math.inf, 0
        done = 0
        while done < moves and clock.left() > 0 and not is_over():
            after = min(done + self.reruns.moves_at_once, moves)
            hot, cold = (top * (_COLD / top) ** (each / moves) for each in (done, after))
            kernels.cool(self.reruns.tables, state, after - done, hot, cold, _PACE)
            clock.work((after - done) * self.reruns.move_seconds)
            done = after

    def adopt(self, incumbent: Incumbent) -> None:
        """Adopt another solver's plan that is better than all known ones."""
        known_seconds = self.pool.least * self.reruns.unit_seconds
        if incumbent.schedule is not None and incumbent.added_seconds < known_seconds * (1 - 1e-9):
            if not self.reruns.can_be(incumbent.schedule, self.problem.budget_bytes):
                self.widen(incumbent.schedule)
            keys = tuple(self.reruns.keys_of(incumbent.schedule))
            self.pool.enter(Member(incumbent.added_seconds / self.reruns.unit_seconds, keys))

    def widen(self, schedule: Schedule) -> None:
        """Enlarge the arrays for a schedule."""
        narrow = self.reruns
        self.reruns = RerunSet(self.problem, self.random.getrandbits(32), slots=narrow.slots, room_for=schedule)
        self.kernels, self.state = self.reruns.kernels, self.reruns.state
        for at, (cost, keys) in enumerate(self.pool.members):
            self.pool.members[at] = Member(cost, tuple(self.reruns.keys_of(narrow.schedule(keys))))

    def take_in(self, incumbent: Incumbent) -> None:
        """Add the best set of a round, if any, to the pool, and offer its plan.

        What the kernels say of it is held against the simulator.
        """
        cost = float(self.state.real[self.kernels.BEST])
        seconds = cost * self.reruns.unit_seconds
        found = math.isfinite(cost)
        self.pool.enter(Member(cost, tuple(sorted(map(int, self.reruns.best())))) if found else None)
        if seconds >= incumbent.added_seconds * (1 - 1e-9):
            return
        schedule = self.reruns.schedule(self.reruns.best())
        evaluation = self.problem.evaluate(schedule)
        slack = abs(evaluation.recompute_seconds - seconds)
        if evaluation.peak_bytes > self.problem.budget_bytes or slack > 1e-6 * evaluation.seconds:
            raise ClaimMismatchError(
                f"solver 'search' claims {seconds} s within {self.problem.budget_bytes} bytes, "
                f"but simulation gives {evaluation.recompute_seconds} s and {evaluation.peak_bytes} bytes; "
                "please report this as a bug"
            )
        incumbent.update(schedule, SearchSolver.name)


SOLVER = SearchSolver()
