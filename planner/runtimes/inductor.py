"""Hands the planned forward and backward to Inductor, which fuses their operations into kernels.

What is planned is the graph after Inductor's own decompositions. Inductor leaves out what fusion makes needless,
and puts kernels in an order of its own, so the graph's peak is not that of its code. The peak that counts is
therefore that of the code, which Inductor drafts before anything is compiled: where it breaks the budget, the
graph is planned anew for less. Sums come out in another order where a fusion differs.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx, nn

from planner.capture.device import of_model
from planner.capture.inductor_internals import Draft, compile_with_inductor, draft_with_inductor, missing_compiler
from planner.capture.inputs import Inputs, check_plannable
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import Stopped, loss_outputs, until_stopped
from planner.capture.torch_internals import PartitionFunction
from planner.common.options import Budget
from planner.common.units import format_bytes
from planner.errors import InfeasibleBudgetError, PlanMismatchError, RuntimeUnsupportedError
from planner.findings.finding import Finding, Severity
from planner.ir.schedule import Schedule
from planner.ir.static_memory import LossMemory
from planner.measure.workspace import effort_for
from planner.plans.plan import NoPlanFitsError, Plan
from planner.plans.planning import with_comparison
from planner.rewrite.graphs import extract_fwd_bwd
from planner.rewrite.inductor_peak import peak_of_drafts
from planner.runtimes import Running
from planner.runtimes._calls import StartsCalls
from planner.runtimes.graph import GraphRuntime
from planner.session.step import Options, PlannedStep, elsewhere_for, lower_step
from planner.session.step_planning import plan_step

ATTEMPTS = 6
"""How often a graph is planned before its budget is given up; nearly all that break it once keep it then."""

IMPROVEMENTS = 3
"""How often a plan that fits, and leaves more than :data:`UNUSED` of the budget, is made anew for more."""

MOST_FUSED = 2
"""A graph that needs more times its budget than this is refused, and not drafted: code never held so much less."""

UNUSED = 0.03
"""What share of the budget may be left where something is recomputed."""


class InductorRuntime(GraphRuntime):
    """What ``model(...)`` runs while a plan is in force; see :meth:`planner.runtimes.Runtime.start`."""

    def __init__(self, model: nn.Module, options: Options, **settings: Any) -> None:
        super().__init__(model, options, compiler=lambda p: partial(self._compiled, p), **settings)
        self.step: PlannedStep | None = None
        """What was planned last."""
        self._fits = False
        self._limit_bytes: int | None = None
        self._budget_bytes = self._needed_bytes = 0
        self._tried: list[Schedule] = []
        """What was drafted for the graph at hand."""

    def plan_only(self, inputs: Inputs) -> Plan:
        """Plan one step by its draft: nothing is compiled, and nothing is run."""

        def drafted(partition: PartitionFunction, graph_module: fx.GraphModule, example_inputs: Any) -> Any:
            self._draft_that_fits(partition, graph_module, example_inputs)
            if self._fits:
                raise Stopped(self.plan)
            return graph_module.forward

        plan: Plan = until_stopped(
            self.model,
            inputs,
            self.partition,
            choose_outputs=partial(loss_outputs, loss=self.options.loss),
            compiler=lambda p: partial(drafted, p),
        )
        return plan

    def planned(self, joint: JointGraph) -> PlannedStep:
        """Plan one captured graph, for less than the budget where its code needs more than the graph."""
        if self.must_match:
            # The budget of a plan that was given is held against the code: the graph may hold more.
            step = plan_step(self.model, joint, self._unlimited(), reuse=self.plan, must_match=True)
            posed = step.study.posed(self.options.budget)
            budget_bytes = posed.budget_bytes + posed.graph.total_static_bytes
            self.step = replace(step, plan=replace(step.plan, budget_bytes=budget_bytes))
        elif self._limit_bytes is None:
            reuse = self._plans.nearest(self._elements(joint))
            self.step = plan_step(self.model, joint, _alone(self.options), reuse=reuse)
        else:
            tighter = replace(_alone(self.options), budget=Budget(budget=self._limit_bytes))
            known = self.step.study if self.step is not None else None
            step = plan_step(self.model, joint, tighter, known=known)
            if step.schedule in self._tried:
                raise Stopped(step)  # it has been drafted
            self.step = replace(step, plan=replace(step.plan, budget_bytes=self._budget_bytes))
        self._tried.append(self.step.schedule)
        return self.step

    def _unlimited(self) -> Options:
        return replace(self.options, budget=Budget(budget=2**60))

    def partition(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan one captured graph and write its forward and backward, or write again what was drafted."""
        if self._fits and self.step is not None:
            return extract_fwd_bwd(lower_step(self.model, joint, self.options).lowered, self.step.schedule)
        return super().partition(joint)

    def _compiled(self, partition: PartitionFunction, graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        drafts = self._draft_that_fits(partition, graph_module, example_inputs)
        try:
            return compile_with_inductor(partition, graph_module, example_inputs, drafts)
        finally:
            self._fits = False

    def _draft_that_fits(
        self, partition: PartitionFunction, graph_module: fx.GraphModule, example_inputs: Any
    ) -> list[Draft]:
        """Plan, draft, and plan anew by what the draft holds: for less where it is too much, for more where it is less.

        What fits and recomputes least is taken.
        """
        must_match = self.must_match  # planning confirms it
        self.step, self._fits, self._tried = None, False, []
        found = _Search()
        refused: NoPlanFitsError | None = None
        try:
            for attempt in range(ATTEMPTS):
                self.options.search.tell(f"drafting Inductor's code{f', attempt {attempt + 1}' if attempt else ''}")
                try:
                    drafts = draft_with_inductor(partition, graph_module, example_inputs)
                except Stopped:
                    break
                except NoPlanFitsError as error:
                    if found.best is not None:
                        break
                    refused, self._limit_bytes = error, self._lowest_bytes(error, refused)
                    continue
                if self.step is None:
                    return drafts  # nothing requires gradients: there is no backward to plan
                self._budget_bytes = self.step.plan.budget_bytes  # of later ones it was set
                self._needed_bytes = self._peak_bytes(self.step, drafts)
                found.add(self.step, drafts, self._needed_bytes, self._budget_bytes)
                if found.best is None and refused is not None:
                    break
                if must_match and found.best is None:
                    raise PlanMismatchError(
                        f"compiled here, the plan holds {format_bytes(self._needed_bytes)}, and its budget is "
                        f"{format_bytes(self._budget_bytes)}: plan again, or pass replan=True"
                    )
                if must_match or found.is_good_enough:
                    break
                self._limit_bytes = found.next_bytes(attempt)
            if found.best is None:
                raise self._too_much(refused.operation if refused is not None else "what Inductor writes")
            step, drafts, needed_bytes = found.best
            plan = self._compared(step) if self.options.search.compare and not must_match else step.plan
            self.step, self._fits = replace(step, plan=_as_compiled(plan, needed_bytes)), True
            self._remember(self.step, step.lowered.joint)
            return drafts
        finally:
            self._limit_bytes = None

    def _compared(self, step: PlannedStep) -> Plan:
        """Set the plan that is taken beside others within the peak of its graph."""
        study = step.study
        problem = study.posed(Budget(budget=step.plan.peak_bytes))
        return with_comparison(problem, step.plan, study.static_memory, self.options.search)

    def _lowest_bytes(self, error: NoPlanFitsError, before: NoPlanFitsError | None) -> int:
        """Return the lowest peak of a graph that has no plan for less: its code may hold less, and is drafted once."""
        if self._limit_bytes is None:
            self._budget_bytes = int(error.report["budget_bytes"])
        static_bytes = sum(error.report["static_bytes"].values())
        lowest_bytes: int = error.minimum_feasible_peak_bytes
        if self.must_match or lowest_bytes - static_bytes > MOST_FUSED * (self._budget_bytes - static_bytes):
            raise error
        if before is not None:
            raise self._too_much(error.operation) from error
        return lowest_bytes

    def _too_much(self, operation: str) -> InfeasibleBudgetError:
        return InfeasibleBudgetError(
            f"the code that Inductor writes for the planned graph holds {format_bytes(self._needed_bytes)}, above the "
            f"budget of {format_bytes(self._budget_bytes)}, and no tighter plan was found whose code keeps it: raise "
            "the budget, or choose runtime 'graph'",
            minimum_feasible_peak_bytes=self._needed_bytes,
            operation=operation,
        )

    def _peak_bytes(self, step: PlannedStep, drafts: list[Draft]) -> int:
        forward, backward = drafts
        loss = self.options.loss or LossMemory()
        effort = effort_for(self.model)
        peak_bytes = peak_of_drafts(forward, backward, step.lowered, step.costs, loss, effort)
        return step.lowered.graph.total_static_bytes + peak_bytes


class _Search:
    """Looks for the limit of the graph's peak at which the peak of its code comes close to the budget."""

    def __init__(self) -> None:
        self.best: tuple[PlannedStep, list[Draft], int] | None = None
        """What fits and recomputes least, its drafts, and what its code holds."""
        self.is_good_enough = False
        self._fitting: list[tuple[int, int]] = []
        """Of graphs whose code fits, by their peaks: that, and what their code holds."""
        self._breaking: list[tuple[int, int]] = []
        """Of graphs whose code does not."""
        self._budget_bytes = self._better = 0

    def add(self, step: PlannedStep, drafts: list[Draft], needed_bytes: int, budget_bytes: int) -> None:
        """Note a plan, and what its code holds."""
        plan, self._budget_bytes = step.plan, budget_bytes
        tried = self._fitting if needed_bytes <= budget_bytes else self._breaking
        tried.append((plan.peak_bytes, needed_bytes))
        tried.sort()
        if needed_bytes <= budget_bytes and (
            self.best is None or plan.recompute_seconds < self.best[0].plan.recompute_seconds
        ):
            self.best = step, drafts, needed_bytes
        if self.best is not None:
            best, _, held_bytes = self.best
            is_used = budget_bytes - held_bytes <= UNUSED * budget_bytes or not best.plan.recomputations
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


def _alone(options: Options) -> Options:
    """Return options of a plan beside which nothing is set: most of those that are drafted are not taken."""
    return replace(options, search=replace(options.search, compare=False))


def _as_compiled(plan: Plan, peak_bytes: int) -> Plan:
    """State the peak of the code in place of the graph's."""
    note = Finding(
        rule="compiled-peak",
        severity=Severity.NOTE,
        evidence=f"the graph holds {format_bytes(plan.peak_bytes)}, the code {format_bytes(peak_bytes)} at most",
        cause="Inductor fuses operations and orders kernels: the peak is counted in the code that it writes, "
        "while placement, baselines and lower bound are those of the graph",
        fix="nothing: the budget is held against the code before it is compiled",
    )
    return replace(
        plan,
        peak_bytes=peak_bytes,
        anatomy={**plan.static_bytes, "compiled code": peak_bytes - plan.total_static_bytes},
        minimum_feasible_peak_bytes=min(plan.minimum_feasible_peak_bytes, peak_bytes),
        warnings=(*(w for w in plan.warnings if w.rule != note.rule), note),
        details=None,
    )


class _Inductor(StartsCalls):
    calls = InductorRuntime
    name = "inductor"
    summary = "the same graphs compiled by Inductor: the peak is counted in the code that it writes"
    tolerance = 1e-4
    exact_peak = False

    def plan(
        self, model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
    ) -> Plan:
        check_can_compile(model, options)
        begun = time.perf_counter()
        options.search.tell("capturing forward and backward")
        check_plannable(model, inputs)
        plan = InductorRuntime(model, options, plan=reuse, replan=not must_match).plan_only(inputs)
        return replace(plan, capture_seconds=time.perf_counter() - begun - plan.solve_seconds)

    def start(self, model: nn.Module, options: Options, **settings: Any) -> Running:
        if of_model(model).type != "meta":  # where it will be is known at its first call
            check_can_compile(model, options)
        return super().start(model, options, **settings)


def check_can_compile(model: nn.Module, options: Options) -> None:
    """Raise a RuntimeUnsupportedError where there is no compiler, or where code is for a device that is not here."""
    if missing := missing_compiler(of_model(model)):
        raise RuntimeUnsupportedError(f"runtime 'inductor' needs {missing}: install it, or choose another runtime")
    if elsewhere_for(model, options) is not None:
        raise RuntimeUnsupportedError(
            f"runtime 'inductor' plans by the code for the device that the model is on, {of_model(model)}, and "
            f"not for {options.target.device}: choose runtime 'graph' to plan for a GPU that is not here"
        )


RUNTIME = _Inductor()
