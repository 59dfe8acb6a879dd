"""Annealing on the set of reruns, for budgets at which the integer programme stalls.

It proves nothing. From scratch it goes from hot to cold; given a plan it starts from that one,
barely warm. The moves and the exact bytes after each are in ``solving.annealing``, compiled by numba,
which is loaded when a search starts and not before.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from planner.common.limits import Clock, SolveLimits
from planner.errors import ClaimMismatchError, SolverUnavailableError
from planner.ir.graph import Operation, OperationCost, TrainingGraph, Value
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.solving.descent import descended
from planner.solving.incumbent import Incumbent
from planner.solving.peak_bounds import lowest_schedule, proven_floor
from planner.solving.rerun_set import RerunSet

_HOT, _WARM, _COLD = 5.0, 0.1, 0.003
"""Temperatures at the start from scratch, at the start from a plan, and at the end, in mean costs of an operation."""

_FAR = 0.02
"""A plan further from the bound, as a share of the step, is none to start from at first: others lie elsewhere."""

_PACE = 1e-3
"""How fast the price of a byte over the budget follows whether the budget is kept: so much a move."""

_ROUND_MOVES, _ROUND_SHARE = 100, 0.25
"""Length of a round of cooling: moves for each operation, but at most this share of the time."""

_CHUNK = 2_000
"""Moves between two looks at the clock."""

_MOVES_PER_OPERATION = 6_000
"""After so many, a search is over however much time is left."""

_DESCENT_SHARE = 0.5
"""Of the time, at most, for a first plan where a round of annealing found none."""

_LEAST_SECONDS = 0.1

_COMPILES = "compiles its kernels, once for this installation, which takes up to half a minute"


def _never() -> bool:
    return False


class SearchSolver:
    """Simulated annealing with exact evaluation of every move."""

    name = "search"
    summary = "annealing on recomputations (needs numba): good plans for very tight budgets, no bound"
    proves_bound = False
    offloads = False

    def solve(self, problem: Problem, *, effort: SolveLimits, progress: Progress | None = None) -> Solution:
        """Search from scratch; a SolverUnavailableError says that numba is not installed."""
        incumbent = Incumbent(problem, progress)
        if not incumbent.update(Schedule.keep_all(problem.graph), self.name):
            if progress and not _is_compiled():
                progress(f"search: {_COMPILES}")
            self.improve(incumbent, effort=effort)
        if incumbent.schedule is None:
            self.descend(incumbent, effort=effort)
        return incumbent.solution()

    def require(self) -> None:
        """Raise SolverUnavailableError if numba is not installed; import nothing."""
        if find_spec("numba") is None:
            raise SolverUnavailableError("solver 'search' needs numba: pip install checkpoint-planner[search]")

    def prepare(self, is_over: Callable[[], bool], progress: Progress) -> bool:
        """Have the kernels compiled without holding up other threads; False if it was over before they were."""
        if _is_compiled():
            return True
        progress(f"search: {_COMPILES}, in a process beside this one")
        process: subprocess.Popen[bytes] | None = None
        while not is_over():
            if _is_compiled() or (process is not None and process.poll() is not None):
                return True
            process = process or _compile_beside()
            time.sleep(0.1)
        return False

    def improve(self, incumbent: Incumbent, *, effort: SolveLimits, is_over: Callable[[], bool] = _never) -> None:
        """Go on from the plan of an incumbent that others may work on, if any; if none is found soon, look for one.

        Now and then it asks whether it is over. A move costs O(runs + reads changed): 3 to 5 us for 1,000 operations.
        The method is that of Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing", Science 220, 1983.
        """
        problem = incumbent.problem
        if proven_floor(problem.graph, problem.costs)[0] > problem.budget_bytes:
            return
        self.require()
        clock = effort.clock()

        def look_lower() -> None:
            share_seconds = max(_DESCENT_SHARE * clock.left(), _LEAST_SECONDS)
            first = replace(effort, time_limit_seconds=share_seconds, told=clock.work)
            self.descend(incumbent, effort=first, is_over=is_over)

        annealing = _Annealing(problem, effort.seed)
        annealing.search(incumbent, clock, lambda: is_over() or incumbent.is_closed(0.0), look_lower)

    def descend(self, incumbent: Incumbent, *, effort: SolveLimits, is_over: Callable[[], bool] = _never) -> None:
        """Look for a plan within the budget, or for the lowest there is, from the lowest that an incumbent has seen."""
        self.require()
        problem = incumbent.problem
        if not incumbent.update(lowest_schedule(problem), self.name):  # it may find less where less is asked for
            incumbent.update(lowest_schedule(replace(problem, budget_bytes=0)), self.name)
        found = descended(problem, incumbent.lowest, effort, lambda: is_over() or incumbent.schedule is not None)
        incumbent.update(found, self.name)


def _is_compiled() -> bool:
    """Say whether numba has kept the kernels of an earlier run; a guess that costs time where it is wrong."""
    folder = _cache_folder()
    return folder is None or any(folder.glob("annealing.descend-*.nbi"))


def _cache_folder() -> Path | None:
    """Return the folder in which numba keeps what it compiles; none where numba is not installed."""
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
    """Call all that numba compiles."""
    problem, effort = smallest(), SolveLimits(deterministic=True)
    SOLVER.solve(problem, effort=effort)
    descended(problem, Schedule.keep_all(problem.graph), effort)


def smallest() -> Problem:
    """Return a problem for which one operation must be run again: enough to compile all kernels."""
    reads = [(), (0,), (1,), (2, 0)]
    graph = TrainingGraph(
        operations=tuple(
            Operation(name=f"o{i}", key=f"o{i}", target="", inputs=inputs, outputs=(i,))
            for i, inputs in enumerate(reads)
        ),
        values=tuple(Value(name=f"v{i}", size_bytes=size) for i, size in enumerate((2, 4, 4, 2))),
    )
    return Problem(graph=graph, costs=(OperationCost(seconds=1.0),) * len(reads), budget_bytes=9)


class _Annealing:
    """Rounds of cooling, each from the best plan or from none."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        self.reruns = RerunSet(problem, seed)
        self.kernels, self.state = self.reruns.kernels, self.reruns.state
        self.adopted: list[tuple[int, int]] | None = None
        self.far_seconds = _FAR * problem.baseline.seconds

    def search(
        self, incumbent: Incumbent, clock: Clock, is_over: Callable[[], bool], look_lower: Callable[[], None]
    ) -> None:
        """Anneal until time is up, offering each plan better than the best known; look lower if a round finds none."""
        kernels, state = self.kernels, self.state
        longest_seconds = _ROUND_SHARE * clock.left()
        move_seconds = self.reruns.move_seconds
        number = moved = 0
        most = _MOVES_PER_OPERATION * len(state.count)
        while moved < most and clock.left() > 0 and not is_over():
            top = self.next_round(number, incumbent)
            number += 1
            begun, moves, gone = clock.left(), 0, 0.0
            while gone < 1.0 and moved < most and clock.left() > 0 and not is_over():
                kernels.anneal(self.reruns.tables, state, _CHUNK, top * (_COLD / top) ** gone, _PACE)
                clock.work(_CHUNK * move_seconds)
                moves += _CHUNK
                moved += _CHUNK
                gone = max((begun - clock.left()) / longest_seconds, moves / (_ROUND_MOVES * len(state.count)))
            self.hand_in(incumbent)
            if number == 1 and incumbent.schedule is None and not is_over():
                look_lower()

    def hand_in(self, incumbent: Incumbent) -> None:
        """Offer the best plan of the kernels, and hold what they say of it against the simulator."""
        seconds = float(self.state.real[self.kernels.BEST]) * self.reruns.unit_seconds
        if not self.state.best[0] or seconds >= incumbent.added_seconds * (1 - 1e-9):
            return
        schedule = self.reruns.schedule(self.reruns.best())
        evaluation = self.problem.evaluate(schedule)
        slack = abs(evaluation.recompute_seconds - seconds)
        if evaluation.peak_bytes > self.problem.budget_bytes or slack > 1e-6 * evaluation.seconds:
            raise ClaimMismatchError(
                f"solver 'search' claims {seconds} s within {self.problem.budget_bytes} bytes, "
                f"simulated are {evaluation.recompute_seconds} s and {evaluation.peak_bytes} bytes; "
                "please report this as a bug"
            )
        incumbent.update(schedule, SearchSolver.name)

    def next_round(self, number: int, incumbent: Incumbent) -> float:
        """Set the plan that a round starts from, and give its first temperature.

        Every fourth time it is none, and the first time if what is known is poor.
        """
        state, kernels, schedule = self.state, self.kernels, incumbent.schedule
        if schedule is not None and incumbent.added_seconds < state.real[kernels.BEST] * self.reruns.unit_seconds:
            state.real[kernels.BEST] = incumbent.added_seconds / self.reruns.unit_seconds
            state.best[0] = 0
            self.adopted = [(slot, index) for slot, runs in schedule.recomputations().items() for index in runs]
        elif state.best[0]:
            self.adopted = [divmod(int(key), len(state.count)) for key in self.reruns.best()]
        if self.adopted is None or number % 4 == 3 or (number == 0 and not incumbent.is_closed(self.far_seconds)):
            self.reruns.reset(())
            return _HOT
        self.reruns.reset(self.adopted)
        return _WARM if number == 0 else float(_WARM * (_HOT / _WARM) ** self.reruns.random.random())


SOLVER = SearchSolver()
