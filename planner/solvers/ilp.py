"""Step-cut integer programming, made exact lazily.

Start from one cut, solve, carry the solution out, simulate. If the simulation breaks the budget,
put a cut where it does and solve again. Each optimum is a lower bound on any plan in the base
order; the first one whose schedule keeps the budget at that cost is optimal. Where more cuts cost
more time than there is, local search brings the carried-out schedule under the budget, so that a
plan comes back with its proven gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.common.limits import SolveLimits
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.solving.budget_rows import BudgetRows, Rounding
from planner.solving.incumbent import Incumbent
from planner.solving.milp import Answer, Library
from planner.solving.path_rows import PathRows, Way
from planner.solving.plan_columns import columns_of
from planner.solving.relaxed_bytes import bytes_between
from planner.solving.repair import lower_peak, take_back, without_useless
from planner.solving.step_cut import Cut, Model, build, carry_out, needed_after

_LEVELS = ((1e-3, 0.8), (3e-4, 0.9), (1e-4, 0.7), (0.0, 0.4))
"""How near to the bound to come, as a share of the step, and until what share of the time that is tried."""

_ENOUGH = 3e-4
"""The gap, as a share of the step, that is worth leaving some of the budget free for."""

_RELAXED_SHARE, _FAR, _FAR_SHARE = 0.5, 0.02, 0.9
"""Until what share of the time cuts are found by relaxations alone, and until which where plan and bound are still so
far from each other, as a share of the step: whole solutions are then out of reach."""

_NEAR_SHARE = 0.25
"""How near to its own bound a programme must come while cuts are still being found, as a share of the open gap."""

_TURN_SHARE = 0.65
"""What share of the time one programme may take while cuts are still being found."""

_OVER, _CUTS_AT_ONCE = 2e-3, 6
"""By so much of the budget a relaxed solution must be over it for a cut there, and so many are added at a time."""

_MENDED = 1.3
"""Beside a plan, so much of the budget a schedule may take at most for local search to be worth its time."""

_HOPELESS = 10.0
"""No plan is worth this many times the step: where the bound says so, the search ends."""

_LP_SECONDS_PER_ROW, _LP_SECONDS_PER_ROW_AND_TURN, _TURN_SECONDS_PER_ROW = 2e-5, 2e-8, 2e-6
"""About what a relaxation takes for each row, and for each row and step; and HiGHS between two questions whether to
stop; where work is counted."""

_SHARES_SECONDS_PER_READ = 1.5e-7
"""About what it takes to carry shares out, for each operation and value; where work is counted."""

_STALLED = 2e-4
"""By so much of the step the bound must rise for rows that are broken to be looked for again."""

_SMALL = 60
"""Up to so many operations, the optimum itself is looked for from the start."""


class IlpSolver:
    """Step-cut ILP with HiGHS, or CBC where that is missing."""

    name = "ilp"
    summary = "step-cut integer programme: near-optimal, with a proven bound on any plan"
    proves_bound = True
    offloads = False

    def solve(self, problem: Problem, *, effort: SolveLimits, progress: Progress | None = None) -> Solution:
        """Find a schedule within the budget and a proven bound.

        Each round is one programme of O(cuts x operations) columns. A single cut takes well under a
        second for 7,000 operations, its optimum nearly always being that of its relaxation; the
        relaxation of three takes half a second for 2,000 and three for 7,000. It relaxes the programme over all steps
        of Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020.
        """
        incumbent = Incumbent(problem)
        self.prove(incumbent, effort=effort, progress=progress)
        return incumbent.solution()

    def prove(self, incumbent: Incumbent, *, effort: SolveLimits, progress: Progress | None = None) -> None:
        """Better a shared incumbent; an InfeasibleBudgetError says that there is no plan, and if that is proven."""
        _StepCutSearch(incumbent, effort, progress or (lambda line: None)).run()


class _StepCutSearch:
    """One solve: how it stands, and how much time is left."""

    def __init__(self, incumbent: Incumbent, effort: SolveLimits, progress: Progress) -> None:
        self.incumbent = incumbent
        self.problem = incumbent.problem
        self.clock = effort.clock()
        self.enough = effort.enough
        self.tell = progress
        self.scale = max((cost.seconds for cost in self.problem.costs), default=0.0) or 1.0
        self.ways: list[Way] = []
        self.roundings: list[Rounding] = []
        """The rows that mattered to the last relaxation, for the next with more cuts."""
        self.last: tuple[list[Cut], Model, Answer] | None = None
        """The last relaxation, with the rows that it needed: the programme itself is often asked for next."""
        self.fits = False  # whether the last programme's own solution kept the budget; what is left is its gap

    def run(self) -> None:
        problem, count = self.problem, len(self.problem.graph.operations)
        if not self.incumbent.update(Schedule.keep_all(problem.graph), IlpSolver.name):
            self.library = Library(self.tell)
            cuts = [Cut(problem.baseline.peak_position)]
            if count <= _SMALL:
                self.add_cuts(cuts, gap_seconds=0.0, share=1.0)
            else:
                self.search(cuts)
        if self.incumbent.schedule is None:
            raise self.incumbent.infeasible()

    def search(self, cuts: list[Cut]) -> None:
        """Find the cuts that matter by relaxations, then come nearer and nearer to the bound."""
        first, step = cuts, self.problem.baseline.seconds
        cuts = self.add_cuts(cuts, gap_seconds=_LEVELS[0][0] * step, share=_RELAXED_SHARE, relax=True)
        if not self.fits:
            cuts = self.add_cuts(cuts, gap_seconds=_FAR * step, share=_FAR_SHARE, relax=True)
        self.fits = False
        for gap, share in _LEVELS:
            if gap < self.enough and self.incumbent.is_closed(self.enough * step):
                break
            cuts = self.add_cuts(cuts, gap_seconds=gap * step, share=share)
            if not self.incumbent.is_closed(gap * step):
                break
        enough_seconds = max(_ENOUGH, self.enough) * step
        if not self.incumbent.is_closed(enough_seconds) and not self.fits:
            self.leave_spare(first, enough_seconds)
            self.add_cuts(cuts, gap_seconds=enough_seconds, share=1.0)

    def add_cuts(self, cuts: list[Cut], *, gap_seconds: float, share: float, relax: bool = False) -> list[Cut]:
        """Solve, carry out, and cut where the budget breaks, until bound and schedule meet."""
        problem, incumbent = self.problem, self.incumbent
        while self.clock.left(share) > 0 and not incumbent.is_closed(gap_seconds):
            is_last = self.fits  # nothing but the gap of this programme itself is left: it may take all the time
            open_seconds = incumbent.added_seconds - incumbent.lower_bound_seconds if incumbent.schedule else 0.0
            near_seconds = max(gap_seconds, _NEAR_SHARE * open_seconds) if not self.fits else gap_seconds
            columns, model = self.solve_cuts(cuts, near_seconds, share, relax=relax)
            if columns is None or incumbent.lower_bound_seconds > _HOPELESS * problem.baseline.seconds:
                break
            schedule, segment = carry_out(problem, cuts, model, columns)
            evaluation = problem.evaluate(schedule)
            self.offer(schedule.order)
            share_of_budget = evaluation.peak_bytes / max(problem.budget_bytes, 1)
            self.tell(
                f"ilp: {len(cuts)} cuts{', relaxed' if relax else ''}, bound {incumbent.lower_bound_seconds:.6g} s, "
                f"carried out at {share_of_budget:.2%} of the budget, found {incumbent.added_seconds:.6g} s"
            )
            self.fits = evaluation.peak_bytes <= problem.budget_bytes
            if self.fits and (is_last or relax):
                break
            if self.fits:
                continue
            if incumbent.schedule is None or evaluation.peak_bytes <= _MENDED * problem.budget_bytes:
                self.mend(schedule.order)
            if relax:
                more = self.cuts_of_shares(cuts, model, columns)
            else:
                more = self.cut_at(cuts, schedule, segment, evaluation.timeline_bytes)
            if more is None:
                break
            cuts = more
        return cuts

    def leave_spare(self, cuts: list[Cut], gap_seconds: float) -> None:
        """Leave some of the budget free at the cuts, for what recomputing takes elsewhere; that proves nothing."""
        problem, incumbent = self.problem, self.incumbent
        low, high = 0.0, 0.5
        while self.clock.left() > 0 and not incumbent.is_closed(gap_seconds) and high - low > 0.005:
            spare = (low + high) / 2
            columns, model = self.solve_cuts(cuts, gap_seconds, 1.0, spare=spare)
            if columns is None:
                high = spare
                continue
            schedule, _ = carry_out(problem, cuts, model, columns)
            evaluation = problem.evaluate(schedule)
            before = incumbent.added_seconds
            self.offer(schedule.order)
            if evaluation.peak_bytes > problem.budget_bytes:
                self.mend(schedule.order)
                low = spare
            else:
                high = spare
            self.tell(f"ilp: {spare:.1%} spare, found {before:.6g} -> {incumbent.added_seconds:.6g} s")

    def solve_cuts(
        self, cuts: list[Cut], gap_seconds: float, share: float, *, spare: float = 0.0, relax: bool = False
    ) -> tuple[list[float] | None, Model]:
        """Solve the programme of some cuts and keep the bound that it proves."""
        spare_bytes = int(spare * self.problem.budget_bytes)
        model = build(self.problem, cuts, spare_bytes)
        if model is None:
            if not spare:
                raise self.incumbent.infeasible(proven=True)
            return None, Model()
        answer: Answer | None
        if not spare and self.last is not None and self.last[0] == cuts:
            _, model, answer = self.last
        else:
            answer = self.relaxed(cuts, model, share) if relax or len(cuts) > 1 else None
            if answer is not None and answer.columns is not None and not spare:
                self.last = cuts, model, answer
        if answer is not None and not spare:
            self.take(answer)
        if not relax and not (answer is not None and answer.infeasible):
            known = self.incumbent.schedule if not spare else None
            start = columns_of(self.problem, cuts, model, known) if known is not None else None
            answer = self.answer(model, gap_seconds, share, start)
            if not spare:
                self.take(answer)
        assert answer is not None
        return answer.columns, model

    def take(self, answer: Answer) -> None:
        """Take the bound of an answer; if there is no solution, no plan exists."""
        if answer.infeasible:
            raise self.incumbent.infeasible(proven=True)
        self.incumbent.raise_bound(answer.bound * self.scale)

    def relaxed(self, cuts: list[Cut], model: Model, share: float) -> Answer:
        """Solve the relaxation of a programme, and again with the rows that its solution breaks."""
        clock, enough = self.clock, _STALLED * self.problem.baseline.seconds / self.scale
        paths, budgets = PathRows(self.problem, cuts, model, self.ways), BudgetRows(model, self.roundings)
        relaxation = self.library.relaxation(model)
        answer, risen = Answer(None, 0.0), math.inf
        while risen > enough and clock.left(share) > 0:
            found = relaxation.solve(None if clock.counts_work else max(clock.left(share), 0.05))
            clock.work(len(model.rows) * (_LP_SECONDS_PER_ROW + found.turns * _LP_SECONDS_PER_ROW_AND_TURN))
            if found.infeasible:
                return found
            if found.columns is None:
                break
            risen, answer = found.bound - answer.bound if answer.columns else math.inf, found
            self.ways, self.roundings = paths.binding(found.prices), budgets.binding(found.prices)
            if not paths.add_broken(found.columns) + budgets.add_broken(found.columns):
                break
        return answer

    def answer(self, model: Model, gap_seconds: float, share: float, start: Sequence[float] | None) -> Answer:
        """Hand a programme to the library, for as long as it may take."""
        clock, rows = self.clock, len(model.rows)
        turn_seconds = clock.left(share)
        if not self.fits:
            turn_seconds = min(turn_seconds, _TURN_SHARE * clock.limit_seconds)
        turn_seconds = max(turn_seconds, 0.05)
        gap = gap_seconds / self.scale
        if not clock.counts_work:
            return self.library.minimise(model, seconds=turn_seconds, gap=gap, start=start)
        turns = 1 + int(turn_seconds / (rows * _TURN_SECONDS_PER_ROW + 1e-6))
        answer = self.library.minimise(model, turns=turns, gap=gap, start=start)
        clock.work(rows * _LP_SECONDS_PER_ROW)
        clock.work(answer.turns * rows * _TURN_SECONDS_PER_ROW)
        return answer

    def offer(self, order: Sequence[int]) -> None:
        """Offer a schedule without the reruns that nobody needs."""
        self.incumbent.update(Schedule(tuple(without_useless(self.problem, order))), IlpSolver.name)

    def mend(self, order: Sequence[int]) -> None:
        """Bring a schedule under the budget by local search."""
        order, peak_bytes = lower_peak(self.problem, order, self.clock)
        if peak_bytes <= self.problem.budget_bytes:
            order = take_back(self.problem, order, self.clock)
        self.offer(order)

    def cuts_of_shares(self, cuts: list[Cut], model: Model, columns: Sequence[float]) -> list[Cut] | None:
        """Add cuts where a relaxed solution is furthest over the budget between two of them; None if it is nowhere."""
        graph = self.problem.graph
        self.clock.work(_SHARES_SECONDS_PER_READ * len(graph.operations) * len(graph.values))
        most_bytes = (1.0 + _OVER) * self.problem.budget_bytes
        worst: list[tuple[float, int]] = []
        for stretch in bytes_between(self.problem, cuts, model, columns):
            over = [(size_bytes, step) for step, size_bytes in stretch.items() if size_bytes > most_bytes]
            worst += sorted(over)[-1:]
        worst.sort(reverse=True)
        found = [*cuts, *(Cut(step) for _, step in worst[:_CUTS_AT_ONCE])]
        return sorted(found, key=lambda cut: cut.step) if worst else None

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


SOLVER = IlpSolver()
