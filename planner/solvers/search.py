"""Annealing on the set of reruns, for budgets at which the integer programme stalls.

It proves nothing. Some plans are found from nothing, going from hot to cold. What runs again
before one moment of the step, and how, hardly depends on what does long after it: so two plans are
put together, the one until some moment, the other from there on, or one of many layers is copied to
others; what comes of it is annealed, barely warm, and the better ones stay. The moves and the exact
bytes after each are in ``solving.annealing``, compiled by numba, which is loaded when a search
starts and not before.
"""

from __future__ import annotations

import fcntl
import math
import os
import subprocess
import sys
import time
from bisect import bisect_left
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
from planner.solving.descent import descended
from planner.solving.incumbent import Incumbent
from planner.solving.peak_bounds import lowest_schedule, proven_floor, proven_peak
from planner.solving.repeats import Repeats
from planner.solving.rerun_set import RerunSet, slots_needed

_HOT, _WARM, _WARMER, _COLD = 5.0, 0.3, 3.0, 0.003
"""Temperatures: at the start from nothing, at the start from plans, at least and at most, and at the end; in mean costs
of an operation."""

_FAR = 0.02
"""A plan further from the bound, as a share of the step, is none to start from at first: others lie elsewhere."""

_PACE = 1e-3
"""How fast the price of a byte over the budget follows whether the budget is kept: so much a move."""

_ROUND_SHARE, _FEWEST_MOVES, _MOST_MOVES = 1 / 64, 20, 60
"""A round takes about this share of the time; it has no fewer and no more moves for each operation than these."""

_CROSSED = 0.6
"""So much shorter is a round that starts from a plan."""

_MANY, _YOUNG_SHARE, _STALE = 12, 0.35, 40
"""Members of a population; the share of the time at most until they are crossed; rounds in a row that let none in,
after which all but the best leave."""

_FROM_NOTHING = 4
"""Beside a plan that is near the bound, one of so many rounds starts from nothing all the same."""

_COPIED = 0.2
"""How often a round starts from a plan in which one repeated layer is copied to others."""

_ONE_PLACE = 0.7
"""How often two plans change from one to the other only once."""

_MOVES_PER_OPERATION = 12_000
"""After so many, a search is over however much time is left."""

_DESCENT_SHARE = 0.8
"""Of what is left of the time, at most, for a first plan after a round of annealing that found none."""

_QUICK_SHARE = 0.15
"""Of what is left of the time, at most, for the plan that a descent begins with."""

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

        Now and then it asks whether it is over. A move costs O(runs + reads changed): a few microseconds for 1,000
        operations. The method is that of Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing", Science
        220, 1983; annealing what comes of crossing is that of Mahfoud, Goldberg, "Parallel recombinative simulated
        annealing", Parallel Computing 21, 1995.
        """
        problem = incumbent.problem
        if proven_floor(problem.graph, problem.costs)[0] > problem.budget_bytes:
            return
        self.require()
        clock = effort.clock()

        def look_lower() -> None:
            if incumbent.take_lowest(self.name):
                return
            if population.number == 1:
                self.begin_low(incumbent, _QUICK_SHARE * clock.left())
            before = None
            while incumbent.lowest != before and incumbent.schedule is None and clock.left() > 0 and not is_over():
                before = incumbent.lowest
                seconds = max(_DESCENT_SHARE * clock.left(), _LEAST_SECONDS)
                part = replace(effort, time_limit_seconds=seconds, told=clock.work)
                incumbent.update(self.descent(incumbent, problem.budget_bytes, part, is_over), self.name)

        population = _Population(problem, effort.seed)
        population.search(incumbent, clock, lambda: is_over() or incumbent.is_closed(0.0), look_lower)

    def descend(self, incumbent: Incumbent, *, effort: SolveLimits) -> None:
        """Look for the plan of the lowest peak, down to the budget, from the lowest that an incumbent has seen."""
        self.require()
        self.begin_low(incumbent, _QUICK_SHARE * effort.time_limit_seconds)
        problem = incumbent.problem
        least_bytes = max(problem.budget_bytes, proven_peak(problem.graph, problem.costs)[0])
        incumbent.update(self.descent(incumbent, least_bytes, effort), self.name)

    def begin_low(self, incumbent: Incumbent, seconds: float) -> None:
        """Show an incumbent the plan of the lowest peak that is found quickly."""
        incumbent.update(lowest_schedule(replace(incumbent.problem, budget_bytes=0), seconds), self.name)

    def descent(
        self, incumbent: Incumbent, least_bytes: int, effort: SolveLimits, is_over: Callable[[], bool] = _never
    ) -> Schedule:
        """Go down from the lowest plan that an incumbent has seen, until it has one within the budget."""
        problem = replace(incumbent.problem, budget_bytes=least_bytes)
        return descended(problem, incumbent.lowest, effort, lambda: is_over() or incumbent.schedule is not None)


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


class _Member(NamedTuple):
    """A set of reruns that keeps the budget: what it costs in the kernels' unit, and its keys in order."""

    cost: float
    keys: tuple[int, ...]


class _Population:
    """Sets of reruns that annealing found from nothing, and crosses of two of them, annealed in turn."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        self.reruns = RerunSet(problem, seed)
        self.kernels, self.state, self.random = self.reruns.kernels, self.reruns.state, self.reruns.random
        self.repeats = Repeats(self.reruns.problem)
        self.members: list[_Member] = []
        self.far_seconds = _FAR * problem.baseline.seconds
        self.number = self.stale = 0
        self.is_hard = False
        """Whether the last round from nothing found no plan."""
        self.begun_seconds = 0.0
        """Time that was left when the population began."""

    def search(
        self, incumbent: Incumbent, clock: Clock, is_over: Callable[[], bool], look_lower: Callable[[], None]
    ) -> None:
        """Anneal until time is up, offering each plan better than the best known; look lower while there is none."""
        count = len(self.state.count)
        self.begun_seconds = clock.left()
        share = clock.left() / self.reruns.move_seconds / count * _ROUND_SHARE
        moves_each = int(min(max(share, _FEWEST_MOVES), _MOST_MOVES))
        moves = 0
        while moves < _MOVES_PER_OPERATION * count and clock.left() > 0 and not is_over():
            self.adopt(incumbent)
            start, top = self.next_start(incumbent, clock)
            length = int(moves_each * (_CROSSED if start else 1.0)) * count
            moves += self.cool(start, top, length, clock, is_over)
            if not start:
                self.is_hard = math.isinf(self.state.real[self.kernels.BEST])
            self.take_in(incumbent)
            if self.stale > _STALE and self.members:
                self.members, self.stale, self.begun_seconds = [min(self.members)], 0, clock.left()
            self.number += 1
            if incumbent.schedule is None and clock.left() > 0 and not is_over():
                look_lower()

    def next_start(self, incumbent: Incumbent, clock: Clock) -> tuple[Sequence[int], float]:
        """Give the keys that a round starts from, and its first temperature.

        Now and then that is a plan with one layer copied to others. Until there are many, or for a share of the time,
        it starts from nothing, or mostly from the best where that is near the bound, or from nothing none is found:
        plans of another kind are then none to look for. After that two are crossed.
        """
        members, warm = self.members, float(_WARM * (_WARMER / _WARM) ** self.random.random())
        if members and self.number and self.random.random() < _COPIED:
            copy = self.copied(self.random.choice([min(members), self.random.choice(members)]))
            if copy is not None:
                return copy, warm
        early = clock.left() > (1 - _YOUNG_SHARE) * self.begun_seconds
        if len(members) < 2 or (early and len(members) < _MANY):
            is_near = incumbent.is_closed(self.far_seconds) or not early or self.is_hard
            if members and is_near and (self.number + 1) % _FROM_NOTHING:
                return min(members).keys, _WARM if self.number == 0 else warm
            return (), _HOT
        return self.crossed(*self.random.sample(members, 2)), warm

    def crossed(self, one: _Member, other: _Member) -> list[int]:
        """Take what one makes again before some slot, and what the other does from there on; or within two slots."""
        places = sorted({*one.keys, *other.keys})
        first, last = sorted(self.random.choices(places, k=2))
        if self.random.random() < _ONE_PLACE:
            last = places[-1] + 1
        start, end = bisect_left(one.keys, first), bisect_left(one.keys, last)
        inner = other.keys[bisect_left(other.keys, first) : bisect_left(other.keys, last)]
        return [*one.keys[:start], *inner, *one.keys[end:]]

    def copied(self, member: _Member) -> list[int] | None:
        """Copy what is made again in a repeated layer to some others of its stretch; None if there are none."""
        count, slots = len(self.state.count), self.reruns.slots
        places = [key // count // slots for key in member.keys]
        inside = [stretch for place in places if (stretch := self.repeats.stretch_of(place))]
        if not inside:
            return None
        stretch = self.random.choice(inside)
        period, length = stretch.period, stretch.end - stretch.first
        offset = self.random.randrange(min(period, length - 2 * period + 1))
        layers = range(stretch.first + offset, stretch.end - period + 1, period)
        source = self.random.choice(layers)
        low, high = sorted(self.random.choices(layers, k=2))
        pattern = [key for key, place in zip(member.keys, places, strict=True) if source <= place < source + period]
        found = {key for key, place in zip(member.keys, places, strict=True) if not low <= place < high + period}
        for layer in range(low, high + 1, period):
            for key in pattern:
                again = self.repeats.made_for(key % count, stretch, (layer - source) // period)
                slot = key // count + slots * (layer - source)
                if again is not None and again < slot // slots:
                    found.add(slot * count + again)
        return sorted(found)

    def cool(self, start: Sequence[int], top: float, moves: int, clock: Clock, is_over: Callable[[], bool]) -> int:
        """Anneal from a set of reruns; give how many moves that took."""
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
        return done

    def adopt(self, incumbent: Incumbent) -> None:
        """Take in a plan of others that is better than all members."""
        best = min(self.members).cost * self.reruns.unit_seconds if self.members else math.inf
        if incumbent.schedule is not None and incumbent.added_seconds < best * (1 - 1e-9):
            if not self.reruns.can_be(incumbent.schedule, self.problem.budget_bytes):
                self.widen(slots_needed(incumbent.schedule))
            keys = tuple(self.reruns.keys_of(incumbent.schedule))
            self.enter(_Member(incumbent.added_seconds / self.reruns.unit_seconds, keys))

    def widen(self, slots: int) -> None:
        """Give each operation so many slots."""
        narrow = self.reruns
        self.reruns = RerunSet(self.problem, self.random.getrandbits(32), slots=slots)
        self.kernels, self.state = self.reruns.kernels, self.reruns.state
        wider = (self.reruns.keys_of(narrow.schedule(member.keys)) for member in self.members)
        self.members = [_Member(each.cost, tuple(keys)) for each, keys in zip(self.members, wider, strict=True)]

    def take_in(self, incumbent: Incumbent) -> None:
        """Take in the best set of a round, if it found one, and offer it.

        What the kernels say of it is held against the simulator.
        """
        cost = float(self.state.real[self.kernels.BEST])
        seconds = cost * self.reruns.unit_seconds
        self.stale += 1
        if math.isfinite(cost):
            self.enter(_Member(cost, tuple(sorted(map(int, self.reruns.best())))))
        if seconds >= incumbent.added_seconds * (1 - 1e-9):
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

    def enter(self, found: _Member) -> None:
        """Let a set in, in place of the dearest where there are many, unless one costs just as much."""
        if any(math.isclose(found.cost, member.cost) for member in self.members):
            return
        if len(self.members) < _MANY:
            self.members.append(found)
        elif found < max(self.members):
            self.members.remove(max(self.members))
            self.members.append(found)
        else:
            return
        self.stale = 0


SOLVER = SearchSolver()
