"""Search for a plan whose compiled code keeps the budget: Inductor's code has another peak than its graph.

The graph is planned for a limit, and Inductor drafts its code. If the code's peak exceeds the budget, the limit is
lowered; if it leaves much of the budget unused, the limit is raised. Of the plans that fit, the one that adds least to
the step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from planner.common.options import Budget
from planner.common.units import format_bytes
from planner.errors import InfeasibleBudgetError, PlanMismatchError
from planner.findings.finding import Finding, Severity
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import Host
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.plans.allocator import reserve_warnings, reserved_by_cuda, whole_peak_bytes
from planner.plans.from_solution import with_comparison
from planner.plans.plan import NoPlanFitsError, Plan
from planner.session.step import Options, PlannedStep

CodeT = TypeVar("CodeT")

FREE = OperationCost(seconds=0.0)

ATTEMPTS = 6
"""How many limits are tried in all; nearly every graph whose code exceeds the budget once fits by then."""

IMPROVEMENTS = 3
"""How often the limit is raised after a plan fits and leaves more than :data:`UNUSED` of the budget."""

MOST_FUSED = 2
"""A graph that needs this many times its budget is refused without a draft: fusion never saved so much."""

UNUSED = 0.03
"""Share of the budget that a plan with recompute may leave unused."""


@dataclass(frozen=True)
class Attempt(Generic[CodeT]):
    """A planned step, its drafted code, and what the device holds for it at most."""

    step: PlannedStep
    code: CodeT
    needed_bytes: int
    holds: Problem | None = None
    """The step with its code in place of its operations."""

    @classmethod
    def of(cls, step: PlannedStep, code: CodeT, graph: TrainingGraph, costs: Sequence[OperationCost]) -> Attempt[CodeT]:
        """Return the attempt of which ``graph`` says what the code holds."""
        budget_bytes = step.plan.budget_bytes - graph.total_static_bytes
        holds = Problem(graph=graph, costs=tuple(costs), budget_bytes=budget_bytes)
        return cls(step, code, whole_peak_bytes(holds, Schedule.keep_all(graph), step.step.static_memory), holds)


class DraftedBeforeError(Exception):
    """The next attempt was drafted before, or has no plan: the best known one is taken."""


class CodeSearch(Generic[CodeT]):
    """Search for the limit of a graph's peak at which its code's peak comes close to the budget.

    :meth:`plan` plans each attempt; the caller drafts its code and reports the code's peak to :meth:`is_enough`. With
    ``must_match`` a given plan is the only attempt.
    """

    def __init__(self, tell: Callable[[str], None] = lambda line: None, *, must_match: bool = False) -> None:
        self.limit_bytes: int | None = None
        """Limit of the graph's peak in the next attempt; None for the budget as asked."""
        self.best: Attempt[CodeT] | None = None
        """The fitting attempt that adds least to the step."""
        self._tell, self._must_match = tell, must_match
        self._fitting: list[tuple[int, int]] = []
        """Peaks of graph and code, of attempts that fit, sorted."""
        self._breaking: list[tuple[int, int]] = []
        """The same of attempts that do not."""
        self._tried: list[Schedule] = []
        """Schedules that were drafted."""
        self._refused: NoPlanFitsError | None = None
        self._budget_bytes = self._attempts = self._better = 0

    def plan(self, plan: Callable[..., PlannedStep], options: Options, reuse: Plan | None) -> PlannedStep:
        """Plan the next attempt; ``plan`` is called with options and a plan to reuse.

        If no plan keeps the limit, the graph's lowest plan is drafted once: fusion may save enough. Raises
        DraftedBeforeError if it was drafted or another plan fits, and InfeasibleBudgetError if nothing fits.
        """
        self._tell(f"drafting Inductor's code{f', attempt {self._attempts + 1}' if self._attempts else ''}")
        try:
            step = self._planned(plan, options, reuse)
        except NoPlanFitsError as error:
            self._refuse(error)
            step = self._planned(plan, options, reuse)
        if step.schedule in self._tried:
            raise DraftedBeforeError
        self._tried.append(step.schedule)
        return step

    def _planned(self, plan: Callable[..., PlannedStep], options: Options, reuse: Plan | None) -> PlannedStep:
        if self._must_match:
            return _given(plan, options, reuse)
        if self.limit_bytes is None:
            return plan(alone(options), reuse=reuse)
        step = plan(replace(alone(options), budget=Budget(self.limit_bytes)))
        return replace(step, plan=replace(step.plan, budget_bytes=self._budget_bytes))

    def _refuse(self, error: NoPlanFitsError) -> None:
        if self.best is not None:
            raise DraftedBeforeError from error
        if self.limit_bytes is None:
            self._budget_bytes = int(error.report["budget_bytes"])
        static_bytes = sum(error.report["static_bytes"].values())
        lowest_bytes = error.minimum_feasible_peak_bytes
        if self._must_match or lowest_bytes - static_bytes > MOST_FUSED * (self._budget_bytes - static_bytes):
            raise error
        if self._refused is not None:
            raise self._too_much(error.operation) from error
        self._refused, self.limit_bytes = error, lowest_bytes

    def is_enough(self, made: Attempt[CodeT]) -> bool:
        """Record an attempt, and say whether it was the last.

        Raises PlanMismatchError if a plan that was given does not keep its budget.
        """
        plan, needed_bytes = made.step.plan, made.needed_bytes
        self._budget_bytes = plan.budget_bytes
        self._attempts += 1
        fits = needed_bytes <= self._budget_bytes
        tried = self._fitting if fits else self._breaking
        tried.append((plan.peak_bytes, needed_bytes))
        tried.sort()
        if fits and (self.best is None or plan.added_seconds < self.best.step.plan.added_seconds):
            self.best = made
        if self._must_match and not fits:
            raise PlanMismatchError(
                f"compiled here, the plan needs {format_bytes(needed_bytes)}, and its budget is "
                f"{format_bytes(self._budget_bytes)}: plan again, or pass Budget(plan=plan, replan=True)"
            )
        is_lowest = self.best is None and self._refused is not None
        if self._must_match or is_lowest or self._is_good_enough() or self._attempts == ATTEMPTS:
            return True
        self.limit_bytes = self._next_bytes()
        return False

    def found(self) -> Attempt[CodeT]:
        """Return the best attempt; an InfeasibleBudgetError says that none keeps the budget."""
        if self.best is None:
            raise self._too_much(self._refused.operation if self._refused is not None else "what Inductor writes")
        return self.best

    def _is_good_enough(self) -> bool:
        if self.best is None:
            return False
        self._better += 1
        unused_bytes = self._budget_bytes - self.best.needed_bytes
        is_used = unused_bytes <= UNUSED * self._budget_bytes or not self.best.step.plan.added_seconds
        return is_used or self._better > IMPROVEMENTS

    def _next_bytes(self) -> int:
        if self.best is None:  # a tighter graph has other code: what it holds falls by less than the graph's peak
            graph_bytes, code_bytes = self._breaking[0]
            return max(1, graph_bytes + (1 << self._attempts - 1) * (self._budget_bytes - code_bytes))
        graph_bytes, code_bytes = self._fitting[-1]
        spare_bytes = self._budget_bytes - code_bytes
        if self._breaking and not graph_bytes < graph_bytes + spare_bytes < self._breaking[0][0]:
            broken_bytes, broken_code_bytes = self._breaking[0]
            return graph_bytes + (broken_bytes - graph_bytes) * spare_bytes // (broken_code_bytes - code_bytes)
        return graph_bytes + spare_bytes

    def _too_much(self, operation: str) -> InfeasibleBudgetError:
        drafted = (code_bytes for _, code_bytes in (*self._fitting, *self._breaking))
        lowest_bytes = min(drafted, default=self.limit_bytes or 0)
        return InfeasibleBudgetError(
            f"the code that Inductor writes for planned graphs needs at least {format_bytes(lowest_bytes)}, and "
            f"the budget is {format_bytes(self._budget_bytes)}: raise it, or choose runtime 'graph'",
            minimum_feasible_peak_bytes=lowest_bytes,
            operation=operation,
        )


def alone(options: Options) -> Options:
    """Return options without comparisons in the report: most drafted plans are discarded."""
    return replace(options, search=replace(options.search, compare=False))


def _given(plan: Callable[..., PlannedStep], options: Options, given: Plan | None) -> PlannedStep:
    """Apply a given plan; the budget is checked against the code, so the graph's own peak may exceed it."""
    unlimited = replace(options, budget=Budget(2**60))
    step = plan(unlimited, reuse=given, must_match=True)
    posed = step.study.posed(options.budget)
    budget_bytes = posed.budget_bytes + posed.graph.total_static_bytes
    return replace(step, plan=replace(step.plan, budget_bytes=budget_bytes))


def host_of(step: PlannedStep, options: Options) -> Host | None:
    """Return the host's memory that a step was planned with; None if it cannot offload."""
    made = step.plan.offloading
    if made is None:
        return None
    return step.study.host_for(replace(options.offload, host_budget=made.host_budget_bytes), options.search)


def as_compiled(found: Attempt[Any], options: Options) -> PlannedStep:
    """Return a step whose plan states its code's peak in place of the graph's.

    Baselines that the options ask for are computed within the graph's peak.
    """
    step, plan, holds, around = found.step, found.step.plan, found.holds, found.step.step.static_memory
    assert holds is not None
    peak_bytes = holds.baseline.peak_bytes + plan.total_static_bytes
    reserved = reserved_by_cuda(holds, Schedule.keep_all(holds.graph), around)
    if options.search.compare:
        problem = step.study.posed(Budget(plan.peak_bytes), host_of(step, options))
        plan = with_comparison(problem, plan, step.study.static_memory, options.search)
    note = Finding(
        rule="compiled-peak",
        severity=Severity.NOTE,
        evidence=f"the graph's peak is {format_bytes(plan.peak_bytes)}, the code's at most {format_bytes(peak_bytes)}",
        cause="Inductor fuses operations and orders kernels: the peak is counted in the code that it writes, "
        "while placement, baselines and lower bound are those of the graph",
        fix="nothing: the code is checked against the budget before it is compiled",
    )
    warnings = (*reserve_warnings(holds, reserved, around), note)
    of_the_graph = {"fragmentation", *(finding.rule for finding in warnings)}
    compiled = replace(
        plan,
        peak_bytes=peak_bytes,
        reserved=reserved,
        anatomy={**plan.static_bytes, "compiled code": peak_bytes - plan.total_static_bytes},
        minimum_feasible_peak_bytes=min(plan.minimum_feasible_peak_bytes, found.needed_bytes),
        warnings=(*(w for w in plan.warnings if w.rule not in of_the_graph), *warnings),
        details=None,
    )
    return replace(step, plan=compiled)
