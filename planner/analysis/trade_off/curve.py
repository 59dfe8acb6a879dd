"""Sweep the curve of overhead over budget: every point is solved from what is known at the others.

A plan that keeps a budget keeps every larger one, and a bound on plans for a budget holds for every smaller
one. So neighbours give a point its first plan and its first bound, and the curve never rises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from planner.analysis.study import Study
from planner.analysis.trade_off.axes import ENOUGH, SizeSearch
from planner.analysis.trade_off.ranges import SizeRange, parse_budgets, spread
from planner.analysis.trade_off.types import TradeOffCurve, TradeOffPoint
from planner.common.limits import Clock
from planner.common.options import Offload, Search
from planner.common.units import Size
from planner.errors import ClaimMismatchError, InfeasibleBudgetError
from planner.ir.host import Host
from planner.ir.problem import Problem, confirm
from planner.ir.schedule import Schedule
from planner.plans.allocator import optimizer_peak_bytes
from planner.plans.comparison import Evaluated, cheapest_within, evaluate
from planner.plans.ordering import in_orders_tried
from planner.plans.plan import Plan
from planner.plans.step_details import over_time
from planner.solvers.auto import AutoSolver
from planner.solving.incumbent import Incumbent
from planner.solving.peak_bounds import proven_lowest

RECOMPUTE_ALONE = "recompute"
"""Solver ``auto`` without offload, beside a curve with it."""

MORE_BYTES = 2**30
"""How much more is asked about beside the budget that was asked about."""

Count = Callable[[int, int], None]
"""Told how many points are done, and of how many."""

_TOLERANCE = 1e-6
"""By so much of the step a bound may be above a plan, since integer programmes are solved in floating point."""

_LEAST_SECONDS = 0.1


class CurveSweep:
    """Solves the points of a curve from coarse to fine, each from what is known at the others.

    The ends come first, then the middle, then the middles of the halves, and so on: every point has a neighbour on
    both sides.

    The search is for the whole curve: each point has an equal share of what is left. ``"auto"`` goes on from the plans
    and bounds of other points while it solves; what other solvers find is held against these when they are done.

    Budgets are ``points`` at equal distances from the smallest for which a plan is known to the peak without recompute,
    or those that ``budgets`` gives, or those of a ``known`` curve of the same study, whose bounds hold here too. Beside
    them stands the one that is ``asked`` about, together with 1 GiB more.
    """

    def __init__(
        self,
        study: Study,
        search: Search,
        *,
        points: int = 20,
        budgets: str | None = None,
        asked: Size | None = None,
        known: CurveSweep | None = None,
        host: Host | None = None,
    ) -> None:
        self.study = study
        self.host = host
        self.search = search
        whole = study.problem()
        self.static_bytes = study.graph.total_static_bytes
        self.baseline = whole.baseline
        self.found = [evaluate(whole, Schedule.keep_all(study.graph), search.solver)]
        self.bounds: dict[int, float] = dict(known.bounds) if known else {}
        self.solved: set[int] = set()
        self.optimizer_bytes = optimizer_peak_bytes(study.graph, study.static_memory)
        orders = in_orders_tried(self._problem(0))
        self.is_in_one_order = len(orders) == 1
        self.proven_bytes = max(
            min(map(proven_lowest, orders)) + self.static_bytes,
            self.optimizer_bytes if study.static_memory.optimizer_step_bytes else 0,
        )
        if known:
            self.lowest_bytes: int = known.lowest_bytes
        else:  # the smallest budget for which a plan is known, and that plan for every solver that may use it
            problem = self._problem(self.proven_bytes)
            lowest = evaluate(problem, study.lowest(problem, effort=search), search.solver)
            if search.solver == AutoSolver.name:
                self.found.append(lowest)
            self.lowest_bytes = max(lowest.peak_bytes, self.proven_bytes)
        self.top_bytes = max(whole.budget_bytes + self.static_bytes, self.lowest_bytes)
        self.budgets: tuple[int, ...]
        if known:
            self.budgets = known.budgets
        elif budgets:
            self.budgets = parse_budgets(budgets, whole_bytes=study.whole_bytes, points=points)
        else:
            self.budgets = spread(self.lowest_bytes, self.top_bytes, points)
        self.asked_bytes = study.problem(asked).budget_bytes + self.static_bytes if asked is not None else None

        self.alone: CurveSweep | None = None
        """The curve of recompute alone, beside one with offload."""

    def run(self, count: Count = lambda done, total: None) -> None:
        """Solve every point; with offload from the plans of recompute alone on, which have as much time."""
        if self.host is not None:
            search = replace(self.search.under(RECOMPUTE_ALONE), solver=AutoSolver.name)
            self.alone = CurveSweep(self.study, search, asked=self.asked_bytes, known=self)
            self.alone.run(count)
            self.found += self.alone.found
        clock = self.search.clock()
        asked = [] if self.asked_bytes is None else [self.asked_bytes, self.asked_bytes + MORE_BYTES]
        order = list(dict.fromkeys([*asked, *coarse_to_fine(self.budgets)]))
        for done, budget_bytes in enumerate(order):
            count(done, len(order))
            share_seconds = clock.left() / (len(order) - done)
            self._solve(budget_bytes, max(share_seconds, _LEAST_SECONDS), clock)
        count(len(order), len(order))

    def curve(self) -> TradeOffCurve:
        """Return what is done."""
        asked = self.asked_bytes
        return TradeOffCurve(
            model=self.study.graph.name,
            device=self.study.origin.device,
            cost_model=self.study.origin.cost_model,
            torch=self.study.origin.torch_version,
            baseline_peak_bytes=self.baseline.peak_bytes + self.static_bytes,
            baseline_step_seconds=self.baseline.seconds,
            minimum_feasible_peak_bytes=max(min(found.peak_bytes for found in self.found), self.proven_bytes),
            proven_minimum_peak_bytes=self.proven_bytes,
            points=tuple(self._point(budget) for budget in self.budgets if budget in self.solved),
            asked=self._point(asked) if asked in self.solved else None,
            asked_more=self._point(asked + MORE_BYTES) if asked and asked + MORE_BYTES in self.solved else None,
            is_complete=self.solved.issuperset(self.budgets),
            host_budget_bytes=self.host.budget_bytes if self.host else None,
            eager=self.study.origin.eager,
        )

    def with_sizes(
        self, sizes: Mapping[str, SizeRange], study_at: Callable[[str, int], Study], *, samples: int, offload: Offload
    ) -> TradeOffCurve:
        """Return the curve with an axis for each ``"batch_size"`` or ``"seq_len"``, at the budget asked about.

        ``study_at`` captures the step at a size by that name; lengths are those of a batch of so many samples.
        """
        axes: dict[str, Any] = {}
        for name, wanted in sizes.items():
            assert self.asked_bytes is not None, "sizes need a budget"
            how: dict[str, Any] = {"study_at": partial(study_at, name), "offload": offload, "samples": samples}
            axes[f"{name}s"] = SizeSearch.along(name, wanted, self.asked_bytes, self.search, **how).run()
        return replace(self.curve(), **axes)

    def plans(self) -> Iterator[Plan]:
        """Return the plan of every point, with its timeline."""
        for point in self.curve().with_asked:
            best = self._best(point.budget_bytes)
            if best is not None:
                bound_seconds = min(self.bound_seconds(point.budget_bytes), best.added_seconds)
                plan = self.study.as_plan(
                    best.schedule, best.name, budget=point.budget_bytes, lower_bound_seconds=bound_seconds
                )
                yield replace(plan, details=over_time(self._problem(point.budget_bytes), best.schedule))

    def bound_seconds(self, budget_bytes: int) -> float:
        """Return the best bound that some point has proven for this budget or a larger one."""
        return max((bound for budget, bound in self.bounds.items() if budget >= budget_bytes), default=0.0)

    def _solve(self, budget_bytes: int, share_seconds: float, clock: Clock) -> None:
        """Improve the best plan known from the neighbouring points."""
        if budget_bytes >= self.proven_bytes:
            incumbent = Incumbent(self._problem(budget_bytes))
            if (best := self._best(budget_bytes)) is not None:
                incumbent.update(best.schedule, best.name)
            incumbent.raise_bound(self.bound_seconds(budget_bytes))
            effort = replace(self.search, time_limit_seconds=share_seconds, enough=ENOUGH, told=clock.work)
            try:
                if not incumbent.is_closed(ENOUGH * self.baseline.seconds):
                    self.study.improve(incumbent, solver=effort.solver, effort=effort, progress=effort.progress)
            except InfeasibleBudgetError as error:
                if error.is_proven and incumbent.schedule is not None:
                    raise ClaimMismatchError(
                        f"no plan keeps {budget_bytes} bytes, says a solver, but one by {incumbent.solver!r} does; "
                        "please report this as a bug"
                    ) from error
                if error.is_proven and self.is_in_one_order:
                    self.proven_bytes = max(self.proven_bytes, budget_bytes + 1)
            self._take(budget_bytes, incumbent)
        self.solved.add(budget_bytes)

    def _problem(self, budget_bytes: int) -> Problem:
        return Problem(
            graph=self.study.graph,
            costs=self.study.costs,
            budget_bytes=budget_bytes - self.static_bytes,
            host=self.host,
            regions=self.study.regions,
        )

    def _take(self, budget_bytes: int, incumbent: Incumbent) -> None:
        """Keep the result of a solve, checked by the simulator and against its own bound."""
        if incumbent.schedule is not None:
            excess_seconds = incumbent.lower_bound_seconds - incumbent.added_seconds
            if excess_seconds > _TOLERANCE * self.baseline.seconds:
                raise ClaimMismatchError(
                    f"a bound of {incumbent.lower_bound_seconds} s at {budget_bytes} bytes is above the "
                    f"{incumbent.added_seconds} s of a plan by {incumbent.solver!r}; please report this as a bug"
                )
            solution = incumbent.solution()
            evaluation = confirm(incumbent.problem, solution)
            self.found.append(evaluate(incumbent.problem, solution.schedule, solution.solver, evaluation=evaluation))
        self.bounds[budget_bytes] = incumbent.lower_bound_seconds

    def _best(self, budget_bytes: int) -> Evaluated | None:
        return cheapest_within(budget_bytes, self.found) if budget_bytes >= self.proven_bytes else None

    def _point(self, budget_bytes: int) -> TradeOffPoint:
        best = self._best(budget_bytes)
        if best is None:
            return TradeOffPoint(budget_bytes=budget_bytes)
        step_seconds = self.baseline.seconds or 1.0
        bound_seconds = min(self.bound_seconds(budget_bytes), best.added_seconds)
        optimal = best.added_seconds - bound_seconds <= 1e-9 * best.added_seconds
        return TradeOffPoint(
            budget_bytes=budget_bytes,
            predicted_peak_bytes=best.peak_bytes,
            overhead=best.overhead,
            host_bytes=best.host_bytes,
            lower_bound_overhead=bound_seconds / step_seconds,
            solver=best.name,
            status="optimal" if optimal else "feasible",
        )


def coarse_to_fine(budgets: Sequence[int]) -> Iterator[int]:
    """Return the ends, then the middle, then the middles of what is left.

    >>> list(coarse_to_fine(range(7)))
    [6, 0, 3, 1, 4, 2, 5]
    """
    if not budgets:
        return
    yield budgets[-1]
    if len(budgets) > 1:
        yield budgets[0]
    gaps = [(0, len(budgets) - 1)]
    for low, high in gaps:
        middle = (low + high) // 2
        if middle > low:
            yield budgets[middle]
            gaps += [(low, middle), (middle, high)]
