"""Annealing on the set of reruns, for budgets at which the integer programme stalls.

It proves nothing. From scratch it goes from hot to cold; given a plan it starts from that one,
barely warm. The moves and the exact bytes after each are in ``solving.annealing``, compiled by numba,
which is loaded when a search starts and not before.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from planner.common.limits import Clock, SolveLimits
from planner.errors import ClaimMismatchError, SolverUnavailableError
from planner.ir.graph import Operation, OperationCost, TrainingGraph, Value
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.solving.incumbent import Incumbent
from planner.solving.peak_bounds import lowest_schedule, proven_floor

_HOT, _WARM, _COLD = 5.0, 0.1, 0.003
"""Temperatures at the start from scratch, at the start from a plan, and at the end, in mean costs of an operation."""

_PACE = 1e-3
"""How fast the price of a byte over the budget follows whether the budget is kept: so much a move."""

_ROUND_MOVES, _ROUND_SHARE = 100, 0.25
"""Length of a round of cooling: moves for each operation, but at most this share of the time."""

_CHUNK = 2_000
"""Moves between two looks at the clock."""

_MOVES_PER_OPERATION = 6_000
"""After so many, a search is over however much time is left."""

_MOVE_SECONDS, _MOVE_SECONDS_PER_OPERATION = 5e-6, 2e-8
"""About what a move takes, where work is counted and not time."""

_COMPILES = "compiles its kernels, once for this installation, which takes up to half a minute"


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
            incumbent.update(lowest_schedule(problem), self.name)
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

    def improve(
        self, incumbent: Incumbent, *, effort: SolveLimits, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Go on from the plan of an incumbent, if any, that others may work on at the same time.

        Now and then it asks whether it is over. A move costs O(runs + reads changed): 10 to 50 us for 1,000 operations.
        The method is that of Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing", Science 220, 1983.
        """
        problem = incumbent.problem
        if proven_floor(problem.graph, problem.costs)[0] > problem.budget_bytes:
            return
        self.require()
        clock = effort.clock()
        annealing = Annealing(problem, effort.seed)
        annealing.search(incumbent, clock, lambda: is_over() or incumbent.is_closed(0.0))


def _is_compiled() -> bool:
    """Say whether numba has kept the kernels of an earlier run; a guess that costs time where it is wrong."""
    folder = _cache_folder()
    return folder is None or any(folder.glob("annealing.anneal-*.nbi"))


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
    command = (
        f"from {__name__} import SOLVER, smallest; SOLVER.solve(smallest(), effort=SolveLimits(deterministic=True))"
    )
    with open(folder / "annealing.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        return subprocess.Popen(
            [sys.executable, "-c", f"from {SolveLimits.__module__} import SolveLimits; {command}"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(lock.fileno(),),  # the lock is the process's, and goes with it
        )


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


class Annealing:
    """One problem laid out for the kernels, and the set of reruns that they work on."""

    def __init__(self, problem: Problem, seed: int) -> None:
        from planner.solving import annealing as kernels

        np: Any = import_module("numpy")
        self.problem = problem
        self.kernels = kernels
        self.random = random.Random(seed)
        graph, costs = problem.graph, problem.costs
        count = len(graph.operations)
        repeatable = [c.seconds for c, o in zip(costs, graph.operations, strict=True) if o.recomputable and c.seconds]
        self.unit_seconds = sum(repeatable) / len(repeatable) if repeatable else 1.0
        self.tables = _tables(problem, kernels, self.unit_seconds)
        capacity = 8 * count + 256

        def zeros(size: int | tuple[int, int]) -> Any:
            return np.zeros(size, np.int64)

        self.state = kernels.State(
            keys=zeros(count + capacity),
            live_bytes=zeros(count + capacity),
            dying_bytes=zeros(count + capacity),
            slots=zeros((count, kernels.COPIES_AT_MOST)),
            count=zeros(count),
            reruns=zeros(capacity),
            best=zeros(1 + capacity),
            changes=zeros(kernels.CHANGES_AT_MOST),
            queue=zeros(2048),
            extended=zeros(1 + max((len(operation.inputs) for operation in graph.operations), default=0)),
            whole=zeros(6),
            real=np.zeros(3),
        )
        self.state.whole[kernels.BUDGET] = problem.budget_bytes
        self.state.whole[kernels.RANDOM] = self.random.getrandbits(62) | 1
        self.state.real[kernels.WEIGHT] = 1.0
        self.state.real[kernels.BEST] = math.inf
        self.adopted: list[tuple[int, int]] | None = None
        self.reset(())

    def reset(self, reruns: Iterable[tuple[int, int]]) -> None:
        """Make the set of reruns exactly these pairs of a slot and an operation."""
        state, kernels, problem = self.state, self.kernels, self.problem
        graph = problem.graph
        count = len(graph.operations)
        timeline = problem.baseline.timeline_bytes
        state.keys[:count] = [index * (count + 1) for index in range(count)]
        state.live_bytes[:count] = timeline
        state.dying_bytes[:count] = 0
        for u, value in enumerate(graph.values):
            if not value.retained:
                last = graph.readers[u][-1] if graph.readers[u] else graph.producer[u]
                state.dying_bytes[last] += value.size_bytes
        state.slots[:, 0] = range(count)
        state.count[:] = 1
        state.whole[kernels.RUNS] = count
        state.whole[kernels.RERUNS] = 0
        state.whole[kernels.EXCESS] = sum(max(live - problem.budget_bytes, 0) for live in timeline)
        state.real[kernels.COST] = 0.0
        for slot, operation in sorted(set(reruns)):
            if state.count[operation] < kernels.COPIES_AT_MOST and state.whole[kernels.RERUNS] < len(state.reruns):
                kernels.add(self.tables, state, slot, operation)

    def schedule(self, keys: Iterable[int]) -> Schedule:
        """Write a set of reruns as a schedule."""
        count = len(self.problem.graph.operations)
        before: dict[int, list[int]] = {}
        for key in sorted(keys):
            before.setdefault(int(key) // count, []).append(int(key) % count)
        return Schedule.with_recomputations(self.problem.graph, before)

    def search(self, incumbent: Incumbent, clock: Clock, is_over: Callable[[], bool]) -> None:
        """Anneal until time is up, offering each plan better than the best known."""
        kernels, state = self.kernels, self.state
        longest_seconds = _ROUND_SHARE * clock.left()
        move_seconds = _MOVE_SECONDS + _MOVE_SECONDS_PER_OPERATION * len(state.count)
        number = moved = 0
        most = _MOVES_PER_OPERATION * len(state.count)
        while moved < most and clock.left() > 0 and not is_over():
            top = self.next_round(number, incumbent)
            number += 1
            begun, moves, gone = clock.left(), 0, 0.0
            while gone < 1.0 and moved < most and clock.left() > 0 and not is_over():
                kernels.anneal(self.tables, state, _CHUNK, top * (_COLD / top) ** gone, _PACE)
                clock.work(_CHUNK * move_seconds)
                moves += _CHUNK
                moved += _CHUNK
                gone = max((begun - clock.left()) / longest_seconds, moves / (_ROUND_MOVES * len(state.count)))
            self.hand_in(incumbent)

    def hand_in(self, incumbent: Incumbent) -> None:
        """Offer the best plan of the kernels, and hold what they say of it against the simulator."""
        seconds = float(self.state.real[self.kernels.BEST]) * self.unit_seconds
        if not self.state.best[0] or seconds >= incumbent.added_seconds * (1 - 1e-9):
            return
        schedule = self.schedule(self.best())
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
        """Set the plan that a round starts from, every fourth time none; give its first temperature."""
        state, kernels, schedule = self.state, self.kernels, incumbent.schedule
        if schedule is not None and incumbent.added_seconds < state.real[kernels.BEST] * self.unit_seconds:
            state.real[kernels.BEST] = incumbent.added_seconds / self.unit_seconds
            state.best[0] = 0
            self.adopted = [(slot, index) for slot, runs in schedule.recomputations().items() for index in runs]
        elif state.best[0]:
            self.adopted = [divmod(int(key), len(state.count)) for key in self.best()]
        if self.adopted is None or number % 4 == 3:
            self.reset(())
            return _HOT
        self.reset(self.adopted)
        return _WARM if number == 0 else float(_WARM * (_HOT / _WARM) ** self.random.random())

    def best(self) -> Any:
        """Return the keys of the cheapest set within the budget that the moves have come by."""
        return self.state.best[1 : 1 + self.state.best[0]]


def _tables(problem: Problem, kernels: Any, unit_seconds: float) -> Any:
    np = import_module("numpy")
    graph, costs = problem.graph, problem.costs
    operations, values, producer, readers = graph.operations, graph.values, graph.producer, graph.readers

    def rows(lists: Iterable[Iterable[int]]) -> tuple[Any, Any]:
        start, flat = [0], list[int]()
        for row in lists:
            flat.extend(row)
            start.append(len(flat))
        return np.array(start, np.int64), np.array(flat, np.int64)

    def counts(some: bool, u: int) -> bool:
        return values[u].size_bytes > 0 and not (some and values[u].retained)

    input_start, inputs = rows([u for u in dict.fromkeys(o.inputs) if counts(True, u)] for o in operations)
    output_start, outputs = rows([u for u in o.outputs if counts(False, u)] for o in operations)
    reader_start, flat_readers = rows(readers)
    droppable = [u for u, p in enumerate(producer) if counts(True, u) and readers[u] and operations[p].recomputable]
    return kernels.Tables(
        input_start=input_start,
        inputs=inputs,
        output_start=output_start,
        outputs=outputs,
        reader_start=reader_start,
        readers=flat_readers,
        size_bytes=np.array([value.size_bytes for value in values], np.int64),
        is_retained=np.array([value.retained for value in values], np.bool_),
        producer=np.array(producer, np.int64),
        costs=np.array([cost.seconds / unit_seconds for cost in costs]),
        workspace_bytes=np.array([cost.workspace_bytes for cost in costs], np.int64),
        state_bytes=np.array([operation.state_bytes for operation in operations], np.int64),
        is_recomputable=np.array([operation.recomputable for operation in operations], np.bool_),
        droppable=np.array(droppable, np.int64),
    )


SOLVER = SearchSolver()
