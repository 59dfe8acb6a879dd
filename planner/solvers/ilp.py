"""Near-optimal plans with a proven bound: a step-cut integer programme to which cuts are added lazily.

Start from one cut, relax, and put cuts where the relaxed solution, a share at a time, breaks the budget most, until it
does so nowhere. Then decide what runs again by branch and bound, carry the solution out, and simulate. If that breaks
the budget, put cuts where it does, and go on with what was decided. All that is proven on the way bounds any plan in
the base order; the first solution whose schedule keeps the budget is optimal. Where time ends before that, local search
has brought schedules under the budget that came near it, so that a plan comes back with its proven gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.common.limits import SolveLimits
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation
from planner.solving.branch_and_bound import Branching, Limits, Tree
from planner.solving.cutting_planes import BudgetRows, Path, PathRows, Rounding
from planner.solving.incumbent import Incumbent
from planner.solving.milp import Answer, Relaxation, exact_optimum, relaxed
from planner.solving.presolve import merged, without_small
from planner.solving.relaxed_bytes import bytes_between
from planner.solving.repair import lower_peak, take_back, without_useless
from planner.solving.step_cut import Cut, Model, build, carry_out, needed_after

_LEVELS = ((0.4, 0.0), (0.7, 1e-4), (0.9, 3e-4), (1.0, 1e-3))
"""Until each share of the time, how near plan and bound are to come, as a share of the step."""

_RELAXED_SHARE = 0.6
"""Until what share of the time cuts are found by relaxations alone."""

_OVER, _CUTS_AT_ONCE = 2e-3, 6
"""By so much of the budget a relaxed solution must be over it for a cut there, and so many are added at a time."""

_MENDED = 1.3
"""Beside a plan, so much of the budget a schedule may take at most for local search to be worth its time."""

_MENDED_SHARE = 0.05
"""Of the time, at most, for one schedule."""

_HOPELESS = 10.0
"""No plan is worth this many times the step: where the bound says so, the search ends."""

_LP_SECONDS_PER_ROW, _LP_SECONDS_PER_ROW_AND_TURN, _NODE_SECONDS_PER_ROW = 1e-5, 8e-9, 2e-7
"""About what a relaxation takes for each row, and for each row and step, and where only little of it has changed; where
work is counted."""

_SHARES_SECONDS_PER_VALUE = 1e-6
"""About what it takes to carry shares out, for each value and cut; where work is counted."""

_SMALL = 60
"""Up to so many operations, the optimum itself is looked for from the start."""


class IlpSolver:
    """Step-cut ILP with HiGHS, or CBC where that is missing."""

    name = "ilp"
    summary = "step-cut integer programme: near-optimal, with a proven bound on any plan"
    offloads = False

    def solve(self, problem: Problem, *, effort: SolveLimits, progress: Progress | None = None) -> Solution:
        """Find a schedule within the budget and a proven bound.

        Each round is one programme of O(cuts x operations) columns. A single cut takes well under a
        second for 7,000 operations, its optimum nearly always being that of its relaxation; the
        relaxation of three takes half a second for 2,000 and three for 7,000. It relaxes the programme over all steps
        of Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020.
        """
        incumbent = Incumbent(problem)
        _StepCutSearch(incumbent, effort, progress or (lambda line: None)).run()
        return incumbent.solution()

    def prove(self, incumbent: Incumbent, *, effort: SolveLimits, progress: Progress | None = None) -> None:
        """Improve an incumbent shared with other solvers; raise InfeasibleBudgetError if there is no plan."""
        _StepCutSearch(incumbent, effort, progress or (lambda line: None)).run()


@dataclass(frozen=True, slots=True)
class _Rows:
    """The kinds of rows that are added where a solution breaks them."""

    paths: PathRows
    budgets: BudgetRows

    def add_broken(self, columns: Sequence[float]) -> int:
        """Add violated rows to the model; return how many."""
        return self.paths.add_broken(columns) + self.budgets.add_broken(columns)


class _StepCutSearch:
    """State of one solve: incumbent, cuts, rows, and the time left."""

    def __init__(self, incumbent: Incumbent, effort: SolveLimits, progress: Progress) -> None:
        self.incumbent = incumbent
        self.problem = incumbent.problem
        self.exact = merged(self.problem)
        self.reduced = without_small(self.exact)
        """What programmes are about, with fewer values; each plan is held to the problem itself."""
        self.clock = effort.clock()
        self.enough = effort.enough
        self.tell = progress
        self.scale = max((cost.seconds for cost in self.problem.costs), default=0.0) or 1.0
        self.ways: list[Path] = []
        self.roundings: list[Rounding] = []
        """The rows that mattered to the last relaxation, for the next with more cuts."""
        self.decided: list[Limits] = [{}]
        """What is decided at each open node of the last tree."""

    def run(self) -> None:
        problem, count = self.problem, len(self.problem.graph.operations)
        if not self.incumbent.update(Schedule.keep_all(problem.graph), IlpSolver.name):
            cuts = [Cut(problem.baseline.peak_position)]
            self.decide(cuts if count <= _SMALL else self.relax(cuts))
        if self.incumbent.schedule is None:
            raise self.incumbent.infeasible()

    def is_over(self, share: float = 1.0) -> bool:
        """Whether a share of the time is used up, or the gap is small enough by now."""
        step_seconds = self.problem.baseline.seconds
        if self.clock.left(share) <= 0 or self.incumbent.lower_bound_seconds > _HOPELESS * step_seconds:
            return True
        gap = next((gap for until, gap in _LEVELS if self.clock.left(until) > 0), _LEVELS[-1][1])
        return self.incumbent.is_closed(max(gap, self.enough) * step_seconds)

    def relax(self, cuts: list[Cut]) -> list[Cut]:
        """Add cuts where relaxations break the budget, until they break it nowhere."""
        while not self.is_over(_RELAXED_SHARE):
            model, answer = self.relaxed(cuts, _RELAXED_SHARE)
            if answer.columns is None:
                break
            self.carried_out(cuts, model, answer.columns)
            more = self.cuts_of_shares(cuts, model, answer.columns)
            if more is None:
                break
            cuts = more
        return cuts

    def decide(self, cuts: list[Cut]) -> None:
        """Solve integer programmes, and add the cuts at which their schedules exceed the budget."""
        while not self.is_over():
            found = self.whole(cuts)
            if found is None:
                break
            model, columns = found
            schedule, segment, evaluation = self.carried_out(cuts, model, columns)
            if evaluation.peak_bytes <= self.problem.budget_bytes:
                break
            more = self.cuts_of_shares(cuts, model, columns)
            more = more or self.cut_at(cuts, schedule, segment, evaluation.timeline_bytes)
            if more is None:
                if self.reduced is self.exact:
                    break
                # Programmes include the smallest values from now on; what was found without them is dropped.
                self.reduced, self.decided, self.ways, self.roundings = self.exact, [{}], [], []
            cuts = more or cuts

    def carried_out(
        self, cuts: list[Cut], model: Model, columns: Sequence[float]
    ) -> tuple[Schedule, list[int], Evaluation]:
        """Turn a solution into a schedule and offer it, repaired first if it could be worth that."""
        problem, incumbent = self.problem, self.incumbent
        schedule, segment = carry_out(self.reduced, cuts, model, columns)
        evaluation = problem.evaluate(schedule)
        self.offer(schedule.order)
        over = evaluation.peak_bytes / max(problem.budget_bytes, 1)
        if over > 1.0 and (incumbent.schedule is None or over <= _MENDED):
            self.mend(schedule.order)
        self.tell(
            f"ilp: budget required at {len(cuts)} moments of the step; any plan adds at least "
            f"{incumbent.lower_bound_seconds:.6g} s, this one peaks at {over:.2%} of the budget"
        )
        return schedule, segment, evaluation

    def relaxed(self, cuts: list[Cut], share: float) -> tuple[Model, Answer]:
        """Solve the relaxation of a programme, and again with the rows that its solution breaks; keep its bound."""
        model, rows = self.model(cuts)
        relaxation = relaxed(model)
        answer = Answer(None, 0.0)
        while self.clock.left(share) > 0:
            found = self.solve(relaxation, model, _LP_SECONDS_PER_ROW)
            if found.infeasible:
                raise self.incumbent.infeasible(proven=True)
            if found.columns is None:
                break
            answer = found
            self.incumbent.raise_bound(answer.bound * self.scale)
            prices = relaxation.prices()
            self.ways, self.roundings = rows.paths.binding(prices), rows.budgets.binding(prices)
            if not rows.add_broken(found.columns):
                break
        return model, answer

    def model(self, cuts: list[Cut]) -> tuple[Model, _Rows]:
        """Build a programme, with the rows that were binding last."""
        model = build(self.reduced, cuts)
        if model is None:
            raise self.incumbent.infeasible(proven=True)
        return model, _Rows(PathRows(self.reduced, cuts, model, self.ways), BudgetRows(model, self.roundings))

    def solve(self, relaxation: Relaxation, model: Model, seconds_per_row: float, turns: int | None = None) -> Answer:
        """Solve a relaxation in the time that is left."""
        clock = self.clock
        answer = relaxation.solve(None if clock.counts_work else max(clock.left(), 0.05), turns)
        clock.work(len(model.rows) * (seconds_per_row + answer.turns * _LP_SECONDS_PER_ROW_AND_TURN))
        return answer

    def whole(self, cuts: list[Cut]) -> tuple[Model, list[float]] | None:
        """Branch and bound until time is up, or the gap is small enough."""
        self.relaxed(cuts, 1.0)
        model, rows = self.model(cuts)  # without the rows that turned out not to matter
        relaxation = relaxed(model)
        branching = Branching(self.reduced, cuts, model)

        def solve(turns: int | None) -> Answer:
            return self.solve(relaxation, model, _NODE_SECONDS_PER_ROW, turns)

        tree = Tree(model, branching, relaxation, rows.add_broken, solve)
        if not tree.open_nodes(map(branching.known, self.decided), self.cutoff):
            return None
        leaf = None
        while True:
            bound = tree.bound(self.cutoff)
            if math.isinf(bound):
                raise self.incumbent.infeasible(proven=True)
            exact = bound if leaf is None else exact_optimum(model, leaf.columns, bound)
            self.incumbent.raise_bound(exact * self.scale)
            if leaf is not None or self.is_over():
                break
            leaf = tree.branch(self.cutoff)
        self.decided = [node.limits for node in tree.open]
        return None if leaf is None else (model, leaf.columns)

    @property
    def cutoff(self) -> float:
        """Cost of the incumbent, in the programmes' unit."""
        return self.incumbent.added_seconds / self.scale

    def offer(self, order: Sequence[int]) -> None:
        """Offer a schedule without recomputations whose outputs are unused."""
        self.incumbent.update(Schedule(tuple(without_useless(self.problem, order))), IlpSolver.name)

    def mend(self, order: Sequence[int]) -> None:
        """Repair a schedule that exceeds the budget by local search, in a share of the time."""
        clock = self.clock.part(_MENDED_SHARE)
        order, peak_bytes = lower_peak(self.problem, order, clock)
        if peak_bytes <= self.problem.budget_bytes:
            order = take_back(self.problem, order, clock)
        self.offer(order)

    def cuts_of_shares(self, cuts: list[Cut], model: Model, columns: Sequence[float]) -> list[Cut] | None:
        """Add cuts where a relaxed solution exceeds the budget most between two cuts; None if it exceeds it nowhere."""
        self.clock.work(_SHARES_SECONDS_PER_VALUE * len(cuts) * len(self.reduced.graph.values))
        most_bytes = (1.0 + _OVER) * self.problem.budget_bytes
        worst: list[tuple[float, int]] = []
        for stretch in bytes_between(self.reduced, cuts, model, columns):
            over = [(size_bytes, step) for step, size_bytes in stretch.items() if size_bytes > most_bytes]
            worst += sorted(over)[-1:]
        worst = sorted(worst, reverse=True)[:_CUTS_AT_ONCE]
        return sorted([*cuts, *(Cut(step) for _, step in worst)], key=lambda cut: cut.step) if worst else None

    def cut_at(
        self, cuts: list[Cut], schedule: Schedule, segment: list[int], timeline: tuple[int, ...]
    ) -> list[Cut] | None:
        """Add the cut that a schedule over the budget calls for; None if it is there already."""
        position = timeline.index(max(timeline))
        order = schedule.order
        first = schedule.first_runs()
        operation = order[position]
        if first[operation] == position:
            return self.with_step(cuts, operation)
        step = next(index for place, index in enumerate(order[position:], position) if first[index] == place)
        # A cut between two steps is about what runs again after the first: that one must be there, too.
        before = self.with_step(cuts, step - 1)
        around = self.with_step(before or cuts, step) or before
        if around is not None:
            return around
        if operation not in needed_after(self.reduced, step - 1)[0]:
            return None
        following = segment[position] + 1
        if operation in cuts[following].again:
            return None
        again = cuts[following].again | {operation}
        wider = next(cut for twin in range(len(cuts) + 1) if (cut := Cut(step, again, twin)) not in cuts)
        is_new = cuts[following] == Cut(step)
        return [*cuts[:following], wider, *cuts[following if is_new else following + 1 :]]

    @staticmethod
    def with_step(cuts: list[Cut], step: int) -> list[Cut] | None:
        if step < 0 or Cut(step) in cuts:
            return None
        return sorted([*cuts, Cut(step)], key=lambda cut: cut.step)


SOLVER = IlpSolver()
