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
    def __init__(self, problem: Problem, time_limit_seconds: float, progress: Progress) -> None:
        self.problem = problem
        self.tell = progress
        self.started = time.perf_counter()
        self.deadline = self.started + time_limit_seconds
        self.scale = max((cost.seconds for cost in problem.costs), default=0.0) or 1.0
        self.lower_bound_seconds = 0.0
        self.best: list[int] | None = None
        self.best_seconds = float("inf")
        self.lowest_peak = (problem.baseline.peak_bytes, list(range(len(problem.graph.operations))))

    def left(self) -> float:
        return self.deadline - time.perf_counter()

    def run(self) -> Solution:
        problem = self.problem
        self.offer(list(range(len(problem.graph.operations))))
        if self.best is not None:
            return self.solution()
        library = _Library(self.tell)
        position = problem.baseline.peak_position
        cuts = [Cut(position)]
        rounds = 0
        while self.left() > 0:
            model = build(problem, cuts)
            if model is None:
                raise self.infeasible(proven=True)
            answer = library.minimise(model, max(self.left(), 0.1))
            rounds += 1
            if answer.infeasible:
                raise self.infeasible(proven=True)
            self.lower_bound_seconds = max(self.lower_bound_seconds, answer.bound * self.scale)
            if answer.columns is None:
                break
            schedule, segment = carry_out(problem, cuts, model, answer.columns)
            evaluation = simulate(problem.graph, problem.costs, schedule)
            self.tell(
                f"ilp: round {rounds}, {len(cuts)} cuts, bound {self.lower_bound_seconds:.6g} s, "
                f"found {self.best_seconds:.6g} s, peak {evaluation.peak_bytes}"
            )
            self.offer(list(schedule.order))
            if self.closed():
                break
            if evaluation.peak_bytes > problem.budget_bytes:
                self.mend(list(schedule.order))
                if self.closed():
                    break
            more = self.cut_at(cuts, schedule, segment, evaluation.timeline_bytes)
            if more is None:
                break
            cuts = more
        if self.best is None:
            raise self.infeasible(proven=False)
        return self.solution()

    def closed(self) -> bool:
        return self.best_seconds <= self.lower_bound_seconds * (1 + 1e-9)

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
        order, peak = lower_peak(self.problem, order, budget_bytes=budget, deadline_seconds=self.deadline)
        if peak <= budget:
            order = take_back(self.problem, order, budget_bytes=budget, deadline_seconds=self.deadline)
        self.offer(order)

    def cut_at(
        self, cuts: list[Cut], schedule: Schedule, segment: list[int], timeline: tuple[int, ...]
    ) -> list[Cut] | None:
        """Add the cut that a schedule over the budget calls for; None if it is there already."""
        position = timeline.index(max(timeline))
        order = schedule.order
        first_runs = {}
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
            f"{how} {self.problem.budget_bytes + static} bytes; {peak + static} were reached, at {operation}",
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

    def minimise(self, model: Model, time_limit_seconds: float, *, relax: bool = False) -> _Answer:
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
                mip=not relax, msg=False, gapRel=0.0, gapAbs=1e-9, threads=1, timeLimit=time_limit_seconds
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
        elif optimal:
            bound = pulp.value(programme.objective)
        if optimal and not relax and abs(exact - bound) <= 1e-6 * max(1.0, exact):
            bound = exact
        return _Answer(values if found else None, max(bound, 0.0))


SOLVER = IlpSolver()
