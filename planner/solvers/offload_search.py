"""Keep, recompute or offload each value, with a bound on all such plans.

The programme of :mod:`planner.solving.offload_bound` says which values to offload, and its optimum is the bound. What
is recomputed beside them is found by the solvers of recompute, for which fetching poses as a recompute of no cost
(:mod:`planner.solving.offload_reduction`); then transfers get time to hide (:mod:`planner.solving.transfer_windows`).
Plans that only recompute are looked for too. What the best of each recomputes is fetched instead
(:mod:`planner.solving.exchange`). From the best on, single values are offloaded or no longer. Only the simulator says
what helps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

from planner import solvers
from planner.common.limits import Clock, SolveLimits
from planner.errors import HostBudgetError, InfeasibleBudgetError
from planner.ir.host import Host
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation
from planner.solving.exchange import exchanged
from planner.solving.incumbent import Incumbent
from planner.solving.milp import Answer, minimise
from planner.solving.offload_bound import OffloadCut, build
from planner.solving.offload_reduction import OffloadReduction, steps_of
from planner.solving.peak_bounds import lowest_schedule, proven_lowest
from planner.solving.repair import lower_peak
from planner.solving.transfer_windows import widened

_SMALL = 60
"""Up to so many operations the programme of a cut is solved itself; beyond, its relaxation, which is nearly always as
good, and the search ends where plan and bound are near each other."""

ENOUGH = 3e-4
"""How near that is, as a share of the step."""

_LP_SECONDS_PER_ROW = 1e-5
"""About what a relaxation takes, where work is counted."""

_SECONDS_PER_RUN = 1e-4
"""About what it takes to give a plan its times, for each of its runs, likewise."""

_LINK_SHARES = (0.85, 0.6, 0.35)
"""Of the link's rate, for choices of fewer values."""

_FIRST_SHARE, _TRIAL_SHARE = 0.6, 0.25
"""Share of the time that is left for a plan without offload, and then for the most promising choice of values, and for
another choice."""


class OffloadSearchSolver:
    """Decide recompute and offload together."""

    name = "offload_search"
    summary = "keep, recompute or offload each value, with a bound on all such plans"
    offloads = True

    def solve(self, problem: Problem, *, effort: SolveLimits, progress: Progress | None = None) -> Solution:
        """Find a schedule within the budgets of device and host; without a host, one that only recomputes.

        If none was found, a HostBudgetError says that one would be with more of the host's memory.
        """
        if problem.host is None:
            return solvers.get("auto").solve(problem, effort=effort, progress=progress)
        tell = progress or (lambda line: None)
        incumbent = Incumbent(problem, lambda line: tell(f"offload_search: {line}"))
        self.improve(incumbent, effort=effort)
        return incumbent.solution()

    def improve(self, incumbent: Incumbent, *, effort: SolveLimits, known: Schedule | None = None) -> None:
        """Improve an incumbent of a problem with a host; raise HostBudgetError if more host memory would help.

        A ``known`` schedule, which may break the budget, says what to offload first.
        """
        assert incumbent.problem.host is not None
        if not incumbent.update(Schedule.keep_all(incumbent.problem.graph), self.name):
            _OffloadSearch(incumbent, effort).run(known)
        if incumbent.schedule is None:
            raise _infeasible(incumbent, incumbent.problem.host)


class _OffloadSearch:
    def __init__(self, incumbent: Incumbent, effort: SolveLimits) -> None:
        assert incumbent.problem.host is not None
        self.incumbent, self.problem, self.effort = incumbent, incumbent.problem, effort
        self.host = incumbent.problem.host
        self.clock: Clock = effort.clock()
        self.movable = ranked(self.problem)
        self.tried: set[tuple[frozenset[int], int]] = set()
        self.is_small = len(self.problem.graph.operations) <= _SMALL
        self.enough_seconds = 0.0 if self.is_small else max(ENOUGH, effort.enough) * self.problem.baseline.seconds
        known = incumbent.schedule.offloads if incumbent.schedule is not None else ()
        self.best = frozenset(offload.value for offload in known)
        """The values that the best plan offloads."""

    def run(self, known: Schedule | None) -> None:
        problem, graph = self.problem, self.problem.graph
        if known is not None and known.offloads:
            self.start_from(known)
        if self.incumbent.schedule is None and proven_lowest(problem) > problem.budget_bytes:
            raise _infeasible(self.incumbent, self.host, proven=True)
        cuts = dict.fromkeys((problem.baseline.peak_position, min(graph.loss_index, len(graph.operations) - 1)))
        _, chosen, step = max(((*self.choose(step), step) for step in cuts), key=lambda choice: choice[0])
        if self.incumbent.schedule is None:  # first without offload: after it, dearer plans were found in what was left
            self.attempt(frozenset(), 0, _FIRST_SHARE)
        start = self.incumbent.schedule
        self.attempt(chosen, 0, _FIRST_SHARE)
        self.make_room()
        for share in _LINK_SHARES:
            if not self.is_over():
                self.attempt(self.choose(step, share)[1])
        for schedule in dict.fromkeys((start, self.incumbent.schedule)):
            self.exchange(schedule)
        if self.incumbent.schedule is None:
            self.offer(lowest_offloading(problem, first_within(problem, self.movable)))
            self.best = chosen
        else:
            self.make_room()
            self.exchange(self.incumbent.schedule)
        while not self.is_over() and self.flip():
            pass

    def start_from(self, known: Schedule) -> None:
        """Plan around what a schedule offloads that may break the budget.

        First more is recomputed until it fits, which takes little time and counts work: there may be none left.
        """
        near = frozenset(offload.value for offload in known.offloads)
        asked, clock = OffloadReduction(self.problem, near), Clock(self.clock.limit_seconds, counts_work=True)
        order, _ = lower_peak(asked.problem, asked.order_from(steps_of(self.problem.graph, known)), clock)
        self.offer(widened(self.problem, asked.invert(Schedule(tuple(order)))))
        for free_bytes in (self.free(near), 0):
            self.attempt(near, free_bytes, _FIRST_SHARE)

    def is_over(self) -> bool:
        return self.clock.left() < 0 or self.incumbent.is_closed(self.enough_seconds)

    def choose(self, step: int, share: float = 1.0) -> tuple[float, frozenset[int]]:
        """Solve a cut's programme and keep its bound; return the offloaded values.

        Of those that so small a share of the link takes, transfers have time to hide.
        """
        host = replace(self.host, bytes_per_second=share * self.host.bytes_per_second)
        cut = build(replace(self.problem, host=host), step)
        answer = self.solved(cut) if cut is not None else None
        if cut is None or answer is None or answer.infeasible:
            raise _infeasible(self.incumbent, self.host, proven=True)
        if share == 1.0:
            self.incumbent.raise_bound(answer.bound * cut.scale)
        away = (u for u, column in cut.away.items() if answer.columns and answer.columns[column] > 0.5)
        return answer.bound * cut.scale, frozenset(away)

    def solved(self, cut: OffloadCut) -> Answer:
        """Solve the programme of a cut."""
        if self.is_small:
            return minimise(cut.model, seconds=None if self.clock.counts_work else self.clock.limit_seconds)
        self.clock.work(len(cut.model.rows) * _LP_SECONDS_PER_ROW)
        return minimise(cut.model, relax=True)

    def attempt(self, values: frozenset[int], free_bytes: int = 0, share: float = _TRIAL_SHARE) -> bool:
        """Plan the recompute around some offloaded values; return whether that improves the incumbent."""
        asked = OffloadReduction(self.problem, values, free_bytes)
        trial = (values, free_bytes)
        if trial in self.tried or asked.problem.budget_bytes <= 0 or self.is_over():
            return False
        self.tried.add(trial)
        share_seconds = max(share * self.clock.left(), 0.1)
        try:
            found = solvers.get("auto").solve(
                asked.problem, effort=replace(self.effort, time_limit_seconds=share_seconds, told=self.clock.work)
            )
        except InfeasibleBudgetError:
            return False
        self.clock.work(len(found.schedule.order) * _SECONDS_PER_RUN)
        return self.offer(widened(self.problem, asked.invert(found.schedule)))

    def offer(self, schedule: Schedule) -> bool:
        """Make a schedule the incumbent, if it is better; return whether it is."""
        if self.problem.evaluate(schedule).host_bytes <= self.host.budget_bytes:
            self.incumbent.update(schedule, OffloadSearchSolver.name)
        if self.incumbent.schedule is not schedule:
            return False
        self.best = frozenset(offload.value for offload in schedule.offloads)
        return True

    def free(self, values: frozenset[int], times: int = 1) -> int:
        """Return some times the size of the largest value."""
        return times * max((self.problem.graph.values[u].size_bytes for u in values), default=0)

    def make_room(self) -> None:
        """Where operations wait for transfers, leave some of the budget free for values that are under way."""
        for free_bytes in [self.free(self.best, times) for times in (1, 2, 4)]:
            schedule = self.incumbent.schedule
            if schedule is None or self.is_over() or self.problem.evaluate(schedule).stall_seconds <= 0:
                return
            self.attempt(self.best, free_bytes)

    def exchange(self, schedule: Schedule | None) -> None:
        """Keep or fetch what a schedule recomputes, as far as that helps."""
        if schedule is not None and not self.is_over():
            self.offer(exchanged(self.problem, schedule, self.clock.part(_TRIAL_SHARE)))

    def flip(self) -> bool:
        """Offload one value more or less (in small graphs also two); return whether that improved the incumbent."""
        helped = False
        for count in (1, 2) if self.is_small else (1,):
            for values in combinations(self.movable, count):
                if self.is_over():
                    return False
                helped = self.attempt(self.best.symmetric_difference(values)) or helped
        return helped


def ranked(problem: Problem) -> list[int]:
    """Return the values that may be offloaded, in falling order of recompute time per byte."""
    assert problem.host is not None
    graph, costs = problem.graph, problem.costs

    def density(u: int) -> float:
        maker = graph.producer[u]
        if not graph.operations[maker].recomputable:
            return float("inf")
        return costs[maker].seconds / graph.values[u].size_bytes

    return sorted(problem.host.movable(graph), key=lambda u: (-density(u), u))


def lowest_offloading(problem: Problem, values: Iterable[int]) -> Schedule:
    """Return the schedule of the lowest peak that quick methods find, given values that may be fetched."""
    asked = OffloadReduction(problem, values)
    return asked.invert(lowest_schedule(asked.problem))


def first_within(problem: Problem, values: Iterable[int]) -> frozenset[int]:
    """Return as many leading values as fit into the host's memory together."""
    assert problem.host is not None
    chosen: set[int] = set()
    left_bytes = problem.host.budget_bytes
    for u in values:
        size_bytes = problem.graph.values[u].size_bytes
        if size_bytes <= left_bytes:
            left_bytes -= size_bytes
            chosen.add(u)
    return frozenset(chosen)


def _infeasible(incumbent: Incumbent, host: Host, *, proven: bool = False) -> InfeasibleBudgetError:
    """Return the error for the budget that is too small: the host's if more host memory would help."""
    problem = incumbent.problem
    values = ranked(problem)

    def lowest(count: int) -> Evaluation:
        return problem.evaluate(lowest_offloading(problem, values[:count]))

    within = first_within(problem, values)
    incumbent.update(lowest_offloading(problem, within), OffloadSearchSolver.name)
    error = incumbent.infeasible(proven=proven)
    # Each is a search of its own: nine of them took 6 s of the first step of a ViT-B, to find that none helps.
    if len(within) == len(values) or lowest(len(values)).peak_bytes > problem.budget_bytes:
        return error
    enough = bisect_left(range(len(values)), True, key=lambda n: lowest(n).peak_bytes <= problem.budget_bytes)
    if (least := lowest(enough)).host_bytes <= host.budget_bytes:
        return error
    return HostBudgetError(
        f"no plan was found within {host.budget_bytes} bytes of the host's memory; one is known for {least.host_bytes}",
        host_budget_bytes=least.host_bytes,
        minimum_feasible_peak_bytes=error.minimum_feasible_peak_bytes,
        operation=error.operation,
        is_proven=proven,
    )


SOLVER = OffloadSearchSolver()
