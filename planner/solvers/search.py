"""Annealing on the set of reruns, for budgets at which the integer programme stalls.

It proves nothing. From scratch it goes from hot to cold; given a plan it starts from that one,
barely warm. The moves and the exact bytes after each are in ``_annealing``, compiled by numba,
which is loaded when a search starts and not before.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from planner.errors import ClaimMismatchError, InfeasibleBudgetError, SolverUnavailableError
from planner.floor import lowest_schedule, proven_floor
from planner.problem import Problem, Progress, Solution
from planner.schedule import Schedule
from planner.simulate import simulate

if TYPE_CHECKING:
    from planner.solvers import _annealing

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


@dataclass(frozen=True, slots=True)
class Limits:
    """When a search ends.

    Parameters
    ----------
    deadline_seconds : float
        On the clock of ``time.perf_counter``.
    moves : int
    enough_seconds : float
        Recompute time that is good enough.
    is_over : callable
    """

    deadline_seconds: float
    moves: int
    enough_seconds: float = 0.0
    is_over: Callable[[], bool] = lambda: False


class SearchSolver:
    """Simulated annealing with exact evaluation of every move."""

    name = "search"
    summary = "annealing on recomputations (needs numba): good plans for very tight budgets, no bound"
    proves_bound = False

    def solve(self, problem: Problem, *, time_limit_seconds: float, progress: Progress | None = None) -> Solution:
        """Search from scratch.

        Raises
        ------
        InfeasibleBudgetError
            If no plan within the budget was found.
        SolverUnavailableError
            If numba is not installed.
        """
        return self.improve(problem, None, time_limit_seconds=time_limit_seconds, progress=progress)

    def require(self) -> None:
        """Raise SolverUnavailableError if numba is not installed; import nothing."""
        if find_spec("numba") is None:
            raise SolverUnavailableError("solver 'search' needs numba: pip install checkpoint-planner[search]")

    def improve(
        self,
        problem: Problem,
        incumbent: Schedule | None,
        *,
        time_limit_seconds: float,
        enough_seconds: float = 0.0,
        is_over: Callable[[], bool] = lambda: False,
        seed: int = 0,
        moves: int | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        """Search from a plan, or from scratch, and give the best plan within the budget that was seen.

        Parameters
        ----------
        problem : Problem
        incumbent : Schedule, optional
            A plan within the budget, to start from.
        time_limit_seconds : float
        enough_seconds : float
            Recompute time at which the search may stop.
        is_over : callable, optional
            Asked now and then whether to stop.
        seed : int
        moves : int, optional
            If given, the search ends after so many, whatever the clock says: the same plan every time.
        progress : callable, optional
            Told in short lines how it stands.

        Notes
        -----
        A move costs O(runs + reads changed): 10 to 50 us for 1,000 operations.

        References
        ----------
        Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing", Science 220, 1983.
        """
        started = time.perf_counter()
        limits = Limits(
            deadline_seconds=math.inf if moves else started + time_limit_seconds,
            moves=moves or _MOVES_PER_OPERATION * len(problem.costs),
            enough_seconds=enough_seconds,
            is_over=is_over,
        )
        best = incumbent
        if problem.baseline.peak_bytes <= problem.budget_bytes:
            best = Schedule.keep_all(problem.graph)
        elif proven_floor(problem.graph, problem.costs)[0] <= problem.budget_bytes:
            self.require()
            tell = progress or (lambda line: None)
            tell("search: starts (its kernels are compiled once for each installation, which takes half a minute)")
            best = Annealing(problem, seed).search(incumbent, limits, tell) or incumbent
        if best is None:
            raise _infeasible(problem)
        evaluation = simulate(problem.graph, problem.costs, best)
        return Solution(
            solver=self.name,
            schedule=best,
            peak_bytes=evaluation.peak_bytes,
            recompute_seconds=evaluation.recompute_seconds,
            solve_seconds=time.perf_counter() - started,
        )


def _infeasible(problem: Problem) -> InfeasibleBudgetError:
    graph, static = problem.graph, problem.graph.total_static_bytes
    schedule = lowest_schedule(graph, problem.costs, target_bytes=problem.budget_bytes)
    evaluation = simulate(graph, problem.costs, schedule)
    operation = graph.operations[schedule.order[evaluation.peak_position]].name
    return InfeasibleBudgetError(
        f"found no plan that keeps {problem.budget_bytes + static} bytes; a plan is known for "
        f"{evaluation.peak_bytes + static}, at {operation}",
        minimum_feasible_peak_bytes=evaluation.peak_bytes + static,
        operation=operation,
    )


class Annealing:
    """One problem laid out for the kernels, and the set of reruns that they work on."""

    def __init__(self, problem: Problem, seed: int) -> None:
        from planner.solvers import _annealing as kernels

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

        self.state: _annealing.State = kernels.State(
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
        self.moves = 0
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

    def search(self, incumbent: Schedule | None, limits: Limits, progress: Progress) -> Schedule | None:
        """Anneal until a limit is reached; give the best schedule seen, None if none was within the budget."""
        kernels, state = self.kernels, self.state
        best = state.real[kernels.BEST :]
        if incumbent is not None:
            seconds = simulate(self.problem.graph, self.problem.costs, incumbent).recompute_seconds
            best[0] = seconds / self.unit_seconds
            self.reset((slot, index) for slot, runs in incumbent.recomputations().items() for index in runs)
        told, step = best[0], self.problem.baseline.seconds / self.unit_seconds
        enough = limits.enough_seconds / self.unit_seconds * (1 + 1e-9)
        begun = time.perf_counter()
        longest_seconds = _ROUND_SHARE * (limits.deadline_seconds - begun)
        number = 0
        while not self.is_spent(limits, enough):
            top = self.next_round(number, fresh=incumbent is None)
            number += 1
            since, moves, gone = time.perf_counter(), 0, 0.0
            while gone < 1.0 and not self.is_spent(limits, enough):
                kernels.anneal(self.tables, state, _CHUNK, top * (_COLD / top) ** gone, _PACE)
                moves += _CHUNK
                self.moves += _CHUNK
                elapsed = time.perf_counter() - since
                gone = max(elapsed / longest_seconds, moves / (_ROUND_MOVES * len(state.count)))
                if best[0] < told * 0.995:
                    told = best[0]
                    progress(f"search: overhead {told / step:.2%}")
        return self.confirmed(self.schedule(self.best()), best[0]) if state.best[0] else None

    def next_round(self, number: int, *, fresh: bool) -> float:
        """Set the plan that a round starts from; give its first temperature."""
        if number == 0 and not fresh:
            return _WARM
        if self.state.best[0] and number % 4:
            self.reset(divmod(int(key), len(self.state.count)) for key in self.best())
            return float(_WARM * (_HOT / _WARM) ** self.random.random())
        self.reset(())
        return _HOT

    def is_spent(self, limits: Limits, enough: float) -> bool:
        """Say whether a limit is reached."""
        if self.moves >= limits.moves or time.perf_counter() >= limits.deadline_seconds or limits.is_over():
            return True
        return bool(self.state.real[self.kernels.BEST] <= enough)

    def best(self) -> Any:
        """Give the keys of the cheapest set within the budget that the moves have come by."""
        return self.state.best[1 : 1 + self.state.best[0]]

    def confirmed(self, schedule: Schedule, cost: float) -> Schedule:
        """Hold what the kernels say of a schedule against the simulator."""
        evaluation = simulate(self.problem.graph, self.problem.costs, schedule)
        slack = abs(evaluation.recompute_seconds - cost * self.unit_seconds)
        if evaluation.peak_bytes > self.problem.budget_bytes or slack > 1e-6 * evaluation.seconds:
            raise ClaimMismatchError(
                f"solver 'search' claims {cost * self.unit_seconds} s within {self.problem.budget_bytes} bytes, "
                f"simulated are {evaluation.recompute_seconds} s and {evaluation.peak_bytes} bytes; "
                "please report this as a bug"
            )
        return schedule


def _tables(problem: Problem, kernels: Any, unit_seconds: float) -> _annealing.Tables:
    """Lay out a graph as arrays."""
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
    return kernels.Tables(  # type: ignore[no-any-return]
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
