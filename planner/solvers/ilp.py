"""Step-cut integer programming, made exact lazily.

Start from one cut, solve, carry the solution out, simulate. If the simulation breaks the budget,
put a cut where it does and solve again. Each optimum is a lower bound on any plan in the base
order; the first one whose schedule keeps the budget at that cost is optimal. Where more cuts cost
more time than there is, local search brings the carried-out schedule under the budget, so that a
plan comes back with its proven gap.

The only module that knows PuLP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.problem import Problem, Progress, Solution
from planner.schedule import Schedule
from planner.simulate import simulate
from planner.solvers._repair import lower_peak, take_back, without_useless
from planner.solvers._stepcut import Cut, Model, build, carry_out, needed_after

_NEAR, _ENOUGH = 1e-4, 3e-4
"""How near to the bound the search is content with, early and late, as a share of the step."""

_HOPELESS = 10.0
"""No plan is worth this many times the step: where the bound says so, the search ends."""

_SMALL = 60
"""Up to so many operations, the optimum itself is looked for from the start."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back from a library: the columns, if any, and a proven bound on the objective."""

    columns: list[float] | None
    bound: float
    infeasible: bool = False


class IlpSolver:
    """Step-cut ILP with HiGHS, or CBC where that is missing."""

    name = "ilp"
    summary = "step-cut integer programme: near-optimal, with a proven bound on any plan"
    proves_bound = True

    def solve(self, problem: Problem, *, time_limit_seconds: float, progress: Progress | None = None) -> Solution:
        """Find a schedule within the budget and a proven bound.

        Notes
        -----
        Each round is one mixed-integer programme of O(cuts x operations) columns; a single cut
        nearly always has a whole LP optimum and takes well under a second for 1,500 operations.

        References
        ----------
        Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
        MLSys 2020, whose programme over all steps this relaxes.
        """
        return _Search(problem, time_limit_seconds, progress or (lambda line: None)).run()


class _Search:
    """One solve: what is proven, what was found, and how much time is left."""

    def __init__(self, problem: Problem, time_limit_seconds: float, progress: Progress) -> None:
        self.problem = problem
        self.tell = progress
        self.time_limit_seconds = time_limit_seconds
        self.started = time.perf_counter()
        self.scale = max((cost.seconds for cost in problem.costs), default=0.0) or 1.0
        self.lower_bound_seconds = 0.0
        self.best: list[int] | None = None
        self.best_seconds = float("inf")
        self.fits = False  # whether the last programme's own solution kept the budget; what is left is its gap
        self.lowest_peak = (problem.baseline.peak_bytes, list(range(len(problem.graph.operations))))

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the time limit is used up."""
        return self.started + share * self.time_limit_seconds - time.perf_counter()

    def run(self) -> Solution:
        problem = self.problem
        self.offer(list(range(len(problem.graph.operations))))
        if self.best is None:
            self.library = _Library(self.tell)
            cuts = [Cut(problem.baseline.peak_position)]
            if len(problem.graph.operations) <= _SMALL:
                self.add_cuts(cuts, gap_seconds=0.0, share=1.0)
            else:
                self.search(cuts)
        if self.best is None:
            raise self.infeasible(proven=False)
        return self.solution()

    def search(self, cuts: list[Cut]) -> None:
        """Come near the bound first, reach it where that is quick, be content with less as time goes."""
        near, enough = (share * self.problem.baseline.seconds for share in (_NEAR, _ENOUGH))
        first = cuts
        cuts = self.add_cuts(cuts, gap_seconds=near, share=0.2)
        if self.is_closed(near):
            self.add_cuts(cuts, gap_seconds=0.0, share=0.1)
        if self.is_closed(near) or self.fits:
            return
        cuts = self.add_cuts(cuts, gap_seconds=enough, share=0.5)
        if not self.fits:
            self.leave_spare(first, enough)
            self.add_cuts(cuts, gap_seconds=enough, share=1.0)

    def add_cuts(self, cuts: list[Cut], *, gap_seconds: float, share: float) -> list[Cut]:
        """Solve, carry out, and cut where the budget breaks, until bound and schedule meet."""
        problem = self.problem
        while self.left(share) > 0 and not self.is_closed(gap_seconds):
            columns, model = self.solve_cuts(cuts, gap_seconds, share)
            if columns is None or self.lower_bound_seconds > _HOPELESS * problem.baseline.seconds:
                break
            schedule, segment = carry_out(problem, cuts, model, columns)
            evaluation = simulate(problem.graph, problem.costs, schedule)
            self.offer(list(schedule.order))
            share_of_budget = evaluation.peak_bytes / max(problem.budget_bytes, 1)
            self.tell(
                f"ilp: {len(cuts)} cuts, bound {self.lower_bound_seconds:.6g} s, carried out at "
                f"{share_of_budget:.2%} of the budget, found {self.best_seconds:.6g} s"
            )
            self.fits = evaluation.peak_bytes <= problem.budget_bytes
            if self.fits:
                break
            self.mend(list(schedule.order))
            more = self.cut_at(cuts, schedule, segment, evaluation.timeline_bytes)
            if more is None:
                break
            cuts = more
        return cuts

    def leave_spare(self, cuts: list[Cut], gap_seconds: float) -> None:
        """Leave some of the budget free at the cuts, for what recomputing takes elsewhere.

        By bisection, since each try costs a programme; what it finds proves nothing.
        """
        problem = self.problem
        low, high = 0.0, 0.5
        while self.left() > 0 and not self.is_closed(gap_seconds) and high - low > 0.005:
            spare = (low + high) / 2
            columns, model = self.solve_cuts(cuts, gap_seconds, 1.0, spare=spare)
            if columns is None:
                high = spare
                continue
            schedule, _ = carry_out(problem, cuts, model, columns)
            evaluation = simulate(problem.graph, problem.costs, schedule)
            before = self.best_seconds
            self.offer(list(schedule.order))
            if evaluation.peak_bytes > problem.budget_bytes:
                self.mend(list(schedule.order))
                low = spare
            else:
                high = spare
            self.tell(f"ilp: {spare:.1%} spare, found {before:.6g} -> {self.best_seconds:.6g} s")

    def solve_cuts(
        self, cuts: list[Cut], gap_seconds: float, share: float, *, spare: float = 0.0
    ) -> tuple[list[float] | None, Model]:
        """Solve the programme of some cuts and keep the bound that it proves."""
        spare_bytes = int(spare * self.problem.budget_bytes)
        model = build(self.problem, cuts, [spare_bytes] * len(cuts))
        if model is None:
            if not spare:
                raise self.infeasible(proven=True)
            return None, Model()
        seconds = max(min(self.left(share), 0.25 * self.time_limit_seconds), 0.05)
        answer = self.library.minimise(model, seconds, gap=gap_seconds / self.scale)
        if not spare:
            if answer.infeasible:
                raise self.infeasible(proven=True)
            self.lower_bound_seconds = max(self.lower_bound_seconds, answer.bound * self.scale)
        return answer.columns, model

    def is_closed(self, gap_seconds: float) -> bool:
        slack = self.best_seconds - self.lower_bound_seconds
        return self.best is not None and slack <= max(gap_seconds, 1e-9 * self.best_seconds)

    def offer(self, order: list[int]) -> None:
        """Take a schedule as the best so far if it is."""
        problem = self.problem
        order = without_useless(problem, order)
        evaluation = simulate(problem.graph, problem.costs, Schedule(tuple(order)))
        if evaluation.peak_bytes < self.lowest_peak[0]:
            self.lowest_peak = (evaluation.peak_bytes, order)
        if evaluation.peak_bytes <= problem.budget_bytes and evaluation.recompute_seconds < self.best_seconds:
            self.best, self.best_seconds = order, evaluation.recompute_seconds

    def mend(self, order: list[int]) -> None:
        """Bring a schedule under the budget by local search."""
        budget = self.problem.budget_bytes
        deadline = self.started + self.time_limit_seconds
        order, peak = lower_peak(self.problem, order, budget_bytes=budget, deadline_seconds=deadline)
        if peak <= budget:
            order = take_back(self.problem, order, budget_bytes=budget, deadline_seconds=deadline)
        self.offer(order)

    def cut_at(
        self, cuts: list[Cut], schedule: Schedule, segment: list[int], timeline: tuple[int, ...]
    ) -> list[Cut] | None:
        """Add the cut that a schedule over the budget calls for; None if it is there already."""
        position = timeline.index(max(timeline))
        order = schedule.order
        first_runs: dict[int, int] = {}
        for place, index in enumerate(order):
            first_runs.setdefault(index, place)
        operation = order[position]
        if first_runs[operation] == position:
            return self.with_step(cuts, operation)
        step = next(index for place, index in enumerate(order[position:], position) if first_runs[index] == place)
        around = self.with_step(self.with_step(cuts, step - 1) or cuts, step)
        if around is not None:
            return around
        if operation not in needed_after(self.problem, step - 1)[0]:
            return None
        following = segment[position] + 1
        if cuts[following] == Cut(step):
            return [*cuts[:following], Cut(step, frozenset([operation])), *cuts[following:]]
        if operation in cuts[following].again:
            return None
        wider = Cut(step, cuts[following].again | {operation})
        return [*cuts[:following], wider, *cuts[following + 1 :]]

    @staticmethod
    def with_step(cuts: list[Cut], step: int) -> list[Cut] | None:
        if step < 0 or Cut(step) in cuts:
            return None
        return sorted([*cuts, Cut(step)], key=lambda cut: cut.step)

    def solution(self) -> Solution:
        assert self.best is not None
        schedule = Schedule(tuple(self.best))
        evaluation = simulate(self.problem.graph, self.problem.costs, schedule)
        return Solution(
            solver=IlpSolver.name,
            schedule=schedule,
            peak_bytes=evaluation.peak_bytes,
            recompute_seconds=evaluation.recompute_seconds,
            lower_bound_seconds=min(self.lower_bound_seconds, evaluation.recompute_seconds),
            solve_seconds=time.perf_counter() - self.started,
        )

    def infeasible(self, *, proven: bool) -> InfeasibleBudgetError:
        peak, order = self.lowest_peak
        graph = self.problem.graph
        evaluation = simulate(graph, self.problem.costs, Schedule(tuple(order)))
        operation = graph.operations[order[evaluation.peak_position]].name
        static = graph.total_static_bytes
        how = "no plan keeps" if proven else "found no plan that keeps"
        return InfeasibleBudgetError(
            f"{how} {self.problem.budget_bytes + static} bytes; a plan is known for {peak + static}, at {operation}",
            minimum_feasible_peak_bytes=peak + static,
            operation=operation,
        )


class _Library:
    """PuLP with HiGHS or CBC."""

    def __init__(self, tell: Progress) -> None:
        try:
            import pulp
        except ImportError as error:
            raise SolverUnavailableError("solver 'ilp' needs PuLP: pip install pulp highspy") from error
        self.pulp: Any = pulp
        self.has_highs = bool(pulp.HiGHS().available())
        if not self.has_highs:
            if not pulp.PULP_CBC_CMD().available():
                raise SolverUnavailableError("solver 'ilp' needs HiGHS or CBC: pip install highspy")
            tell("ilp: highspy is not installed, falling back on CBC, which is slower")

    def minimise(self, model: Model, time_limit_seconds: float, *, gap: float = 0.0, relax: bool = False) -> _Answer:
        """Solve a model, or its LP relaxation."""
        pulp = self.pulp
        if not model.rows:
            return _Answer([0.0] * len(model.cost), 0.0)
        programme = pulp.LpProblem("stepcut", pulp.LpMinimize)
        columns = [
            pulp.LpVariable(f"x{c}", 0, 1, pulp.LpInteger if whole else pulp.LpContinuous)
            for c, whole in enumerate(model.integer)
        ]
        programme += pulp.LpAffineExpression([(columns[c], cost) for c, cost in enumerate(model.cost) if cost])
        for terms, least in model.rows:
            programme += pulp.LpAffineExpression([(columns[c], weight) for c, weight in terms]) >= least
        if self.has_highs:
            solver = pulp.HiGHS(
                mip=not relax, msg=False, gapRel=0.0, gapAbs=max(gap, 1e-9), threads=1, timeLimit=time_limit_seconds
            )
        else:
            solver = pulp.PULP_CBC_CMD(mip=not relax, msg=False, timeLimit=time_limit_seconds)
        programme.solve(solver)
        if programme.status == pulp.LpStatusInfeasible:
            return _Answer(None, 0.0, infeasible=True)
        found = programme.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        values = [column.varValue or 0.0 for column in columns]
        found = found and bool(programme.variables())
        optimal = programme.sol_status == pulp.LpSolutionOptimal
        exact = sum(cost for cost, value in zip(model.cost, values, strict=True) if value > 0.5)
        bound = 0.0
        if self.has_highs:
            info = programme.solverModel.getInfo()
            bound = info.objective_function_value if relax else info.mip_dual_bound
        elif optimal or relax:
            bound = pulp.value(programme.objective) if optimal else 0.0
        else:  # CBC keeps its dual bound to itself
            bound = self.minimise(model, time_limit_seconds, relax=True).bound
        if optimal and not relax and abs(exact - bound) <= 1e-6 * max(1.0, exact):
            bound = exact
        return _Answer(values if found else None, max(bound, 0.0))


SOLVER = IlpSolver()
