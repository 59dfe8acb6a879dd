"""Looks for a plan whose code keeps the budget, where Inductor's code holds something else than its graph.

A plan is made for a limit of the graph's peak, and its code is drafted. Where the code holds too much the graph is
planned anew for less, and where it leaves much of the budget, for more. Of those that fit, the one that recomputes
least is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from planner.common.options import Budget, Search
from planner.common.units import format_bytes
from planner.errors import InfeasibleBudgetError, PlanMismatchError
from planner.findings.finding import Finding, Severity
from planner.plans.plan import NoPlanFitsError, Plan
from planner.plans.planning import with_comparison
from planner.session.step import Options, PlannedStep

CodeT = TypeVar("CodeT")

ATTEMPTS = 6
"""How often a graph is planned before its budget is given up; nearly all that break it once keep it then."""

IMPROVEMENTS = 3
"""How often a plan that fits, and leaves more than :data:`UNUSED` of the budget, is made anew for more."""

MOST_FUSED = 2
"""A graph that needs more times its budget than this is refused, and not drafted: code never held so much less."""

UNUSED = 0.03
"""What share of the budget may be left where something is recomputed."""


@dataclass(frozen=True)
class Attempt(Generic[CodeT]):
    """A planned step, its code, and what that holds with all that is resident."""

    step: PlannedStep
    code: CodeT
    needed_bytes: int


@dataclass(frozen=True)
class Limit:
    """What the peak of a graph is to keep, for its code to keep the budget."""

    graph_bytes: int
    budget_bytes: int


class DraftedBeforeError(Exception):
    """An attempt came to a plan whose code is known."""


def fitting(
    attempt: Callable[[Limit | None], Attempt[CodeT]], tell: Callable[[str], None], *, must_match: bool
) -> Attempt[CodeT]:
    """Make attempts, each with a limit and the first as was asked for, until one is good enough.

    Raises InfeasibleBudgetError if none keeps the budget. With ``must_match`` the plan was given, so there is one
    attempt, and a PlanMismatchError if it does not.
    """
    found = _Search[CodeT]()
    refused: NoPlanFitsError | None = None
    limit: Limit | None = None
    budget_bytes = needed_bytes = 0
    for number in range(ATTEMPTS):
        tell(f"drafting Inductor's code{f', attempt {number + 1}' if number else ''}")
        try:
            made = attempt(limit)
        except DraftedBeforeError:
            break
        except NoPlanFitsError as error:
            if found.best is not None:
                break
            if limit is None:
                budget_bytes = int(error.report["budget_bytes"])
            if must_match or _is_far_off(error, budget_bytes):
                raise
            if refused is not None:
                raise _too_much(needed_bytes, budget_bytes, error.operation) from error
            # The code of the lowest graph may hold less than the graph, so it is drafted once.
            refused, limit = error, Limit(error.minimum_feasible_peak_bytes, budget_bytes)
            continue
        budget_bytes, needed_bytes = made.step.plan.budget_bytes, made.needed_bytes
        found.add(made, budget_bytes)
        if found.best is None and refused is not None:
            break
        if must_match and found.best is None:
            raise PlanMismatchError(
                f"compiled here, the plan holds {format_bytes(needed_bytes)}, and its budget is "
                f"{format_bytes(budget_bytes)}: plan again, or pass replan=True"
            )
        if must_match or found.is_good_enough:
            break
        limit = Limit(found.next_bytes(number), budget_bytes)
    if found.best is None:
        what = refused.operation if refused is not None else "what Inductor writes"
        raise _too_much(needed_bytes, budget_bytes, what)
    return found.best


def alone(options: Options) -> Options:
    """Return options of a plan beside which nothing is set: most of those that are drafted are not taken."""
    return replace(options, search=replace(options.search, compare=False))


def within(limit: Limit, plan: Callable[[Options], PlannedStep], options: Options) -> PlannedStep:
    """Plan a graph for a limit; the plan's budget is the one that its code is to keep."""
    step = plan(replace(alone(options), budget=Budget(budget=limit.graph_bytes)))
    return replace(step, plan=replace(step.plan, budget_bytes=limit.budget_bytes))


def given_plan(plan: Callable[..., PlannedStep], options: Options, given: Plan | None) -> PlannedStep:
    """Take over a plan that was given; its budget is held against the code, of which the graph may hold more."""
    unlimited = replace(options, budget=Budget(budget=2**60))
    step = plan(unlimited, reuse=given, must_match=True)
    posed = step.study.posed(options.budget)
    budget_bytes = posed.budget_bytes + posed.graph.total_static_bytes
    return replace(step, plan=replace(step.plan, budget_bytes=budget_bytes))


def _is_far_off(error: NoPlanFitsError, budget_bytes: int) -> bool:
    """Whether the lowest graph needs so much more than the budget that its code is not drafted."""
    static_bytes: int = sum(error.report["static_bytes"].values())
    return error.minimum_feasible_peak_bytes - static_bytes > MOST_FUSED * (budget_bytes - static_bytes)


def _too_much(needed_bytes: int, budget_bytes: int, operation: str) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"the code that Inductor writes for the planned graph holds {format_bytes(needed_bytes)}, above the "
        f"budget of {format_bytes(budget_bytes)}, and no tighter plan was found whose code keeps it: raise "
        "the budget, or choose runtime 'graph'",
        minimum_feasible_peak_bytes=needed_bytes,
        operation=operation,
    )


class _Search(Generic[CodeT]):
    """Looks for the limit of the graph's peak at which the peak of its code comes close to the budget."""

    def __init__(self) -> None:
        self.best: Attempt[CodeT] | None = None
        """What fits and recomputes least."""
        self.is_good_enough = False
        self._fitting: list[tuple[int, int]] = []
        """Of graphs whose code fits, by their peaks: that, and what their code holds."""
        self._breaking: list[tuple[int, int]] = []
        """Of graphs whose code does not."""
        self._budget_bytes = self._better = 0

    def add(self, made: Attempt[CodeT], budget_bytes: int) -> None:
        """Note a plan, and what its code holds."""
        plan, needed_bytes, self._budget_bytes = made.step.plan, made.needed_bytes, budget_bytes
        tried = self._fitting if needed_bytes <= budget_bytes else self._breaking
        tried.append((plan.peak_bytes, needed_bytes))
        tried.sort()
        if needed_bytes <= budget_bytes and (
            self.best is None or plan.recompute_seconds < self.best.step.plan.recompute_seconds
        ):
            self.best = made
        if self.best is not None:
            unused_bytes = budget_bytes - self.best.needed_bytes
            is_used = unused_bytes <= UNUSED * budget_bytes or not self.best.step.plan.recomputations
            self._better += 1
            self.is_good_enough = is_used or self._better > IMPROVEMENTS

    def next_bytes(self, attempt: int) -> int:
        """Return the limit of the graph's peak that is to be tried next."""
        if self.best is None:  # a tighter graph has other code: what it holds falls by less than the graph's peak
            graph_bytes, code_bytes = self._breaking[0]
            return max(1, graph_bytes + (1 << attempt) * (self._budget_bytes - code_bytes))
        graph_bytes, code_bytes = self._fitting[-1]
        spare_bytes = self._budget_bytes - code_bytes
        if self._breaking and not graph_bytes < graph_bytes + spare_bytes < self._breaking[0][0]:
            broken_bytes, broken_code_bytes = self._breaking[0]
            return graph_bytes + (broken_bytes - graph_bytes) * spare_bytes // (broken_code_bytes - code_bytes)
        return graph_bytes + spare_bytes


def as_compiled(found: Attempt[Any], search: Search) -> PlannedStep:
    """Return a step whose plan states the peak of its code in place of the graph's.

    Others that ``search`` compares it with are set beside it within the peak of its graph.
    """
    step, peak_bytes = found.step, found.needed_bytes
    plan = step.plan
    if search.compare:
        problem = step.study.posed(Budget(budget=plan.peak_bytes))
        plan = with_comparison(problem, plan, step.study.static_memory, search)
    note = Finding(
        rule="compiled-peak",
        severity=Severity.NOTE,
        evidence=f"the graph holds {format_bytes(plan.peak_bytes)}, the code {format_bytes(peak_bytes)} at most",
        cause="Inductor fuses operations and orders kernels: the peak is counted in the code that it writes, "
        "while placement, baselines and lower bound are those of the graph",
        fix="nothing: the budget is held against the code before it is compiled",
    )
    compiled = replace(
        plan,
        peak_bytes=peak_bytes,
        anatomy={**plan.static_bytes, "compiled code": peak_bytes - plan.total_static_bytes},
        minimum_feasible_peak_bytes=min(plan.minimum_feasible_peak_bytes, peak_bytes),
        warnings=(*(w for w in plan.warnings if w.rule != note.rule), note),
        details=None,
    )
    return replace(step, plan=compiled)
