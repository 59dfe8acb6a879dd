"""From a recorded eager step to a plan of checkpointed modules."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from planner import timings
from planner.checkpoint_choice import NAME, Chooser
from planner.checkpoints import Region, schedule_of
from planner.eager_graph import lower_eager
from planner.eager_record import record
from planner.eager_trace import Trace
from planner.effort import Clock, Effort
from planner.errors import PlanMismatchError
from planner.findings import Finding
from planner.graph import OperationCost
from planner.host import host_of
from planner.inputs import Inputs
from planner.layers import find_layers
from planner.module_offload import cheapest_with_offload, offloading_ways, ways_in, with_modules
from planner.operands import is_opaque
from planner.plan_match import check_match
from planner.plan_parts import BaselineRow, PlanOrigin
from planner.planning import Plan, make_plan, make_problem, plan_from_solution
from planner.problem import Problem, Solution
from planner.reservation import optimizer_peak_bytes
from planner.resident import surroundings
from planner.schedule import Schedule
from planner.selective import cheapest, ways_of, with_kept
from planner.session import Options, cost, device_spec, fingerprint, problems_of
from planner.simulate import simulate
from planner.step_details import step_details
from planner.study_types import EagerStudy
from planner.surroundings import LossMemory, as_planned

_NO_TROUBLE = ("full-backward-hooks",)
"""Rules that an eager step may break."""


def plan_eager(
    model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
) -> Plan:
    """Plan one eager step; see :func:`planner.step_planning.plan_step`."""
    return _recorded(model, inputs, options).plan(reuse, must_match)


def study_eager(model: nn.Module, inputs: Inputs, options: Options) -> EagerStudy:
    """Record and cost one eager step; see :func:`planner.studying.study`."""
    step = _recorded(model, inputs, options)
    return EagerStudy(
        graph=step.graph, costs=step.costs, origin=step.origin, surroundings=step.around, regions=step.regions
    )


def _recorded(model: nn.Module, inputs: Inputs, options: Options) -> _Session:
    begun = time.perf_counter()
    if options.progress is not None:
        options.progress("recording a step")
    with timings.stage("capture"):
        trace = record(model, inputs, has_loss=options.loss is not None)
    return _Session(model, inputs, options, trace, begun)


class _Session:
    def __init__(self, model: nn.Module, inputs: Inputs, options: Options, trace: Trace, begun: float) -> None:
        self.options = options
        self.is_real = trace.is_real
        tensors = inputs.tensors()
        spec = device_spec(model, options.device)
        host = host_of(spec, options.host_budget, at_least=options.offload_at_least) if options.offload else None
        around = surroundings(model, tensors, spec, options.training)
        if options.taken_over is not None:
            around = as_planned(around, options.taken_over)
        step = lower_eager(
            trace,
            model,
            tensors,
            alignment_bytes=spec.alignment_bytes,
            static_bytes=dict(around.static_bytes),
            name=options.name or type(model).__name__,
            loss=options.loss or LossMemory(),
            on_cpu=spec.kind == "cpu",
            least_bytes=host.least_bytes if host is not None else None,
        )
        costing = cost(model, step.lowered, spec, options)
        origin = PlanOrigin(
            fingerprint=fingerprint(model, step.lowered.graph, spec.name, step.lowered.joint),
            capture_seconds=time.perf_counter() - begun,
            cost_model=costing.cost_model,
            device=spec.name,
            torch_version=torch.__version__,
            runtime=options.runtime,
            warnings=(
                *costing.warnings,
                *_notes(trace),
                *problems_of(
                    model,
                    options,
                    outside_bytes=trace.outside_bytes if trace.outside_bytes > spec.alignment_bytes else 0,
                    returned_cache=trace.returned_cache,
                    allowed=_NO_TROUBLE,
                ),
            ),
        )
        self.graph = step.lowered.graph
        self.regions = step.regions
        self.costs = tuple(
            OperationCost(seconds=0.0)
            if node is None
            else replace(cost, workspace_bytes=step.workspace_bytes.get(index, cost.workspace_bytes))
            for index, (node, cost) in enumerate(zip(step.lowered.operation_nodes, costing.costs, strict=True))
        )
        self.around = around
        self.origin = origin
        self.host = host
        self._ways: tuple[Region, ...] = ()
        """Those that were found, where modules may send what they save."""

    def plan(self, reuse: Plan | None, must_match: bool) -> Plan:
        """Take a plan over if it fits, else make one."""
        if reuse is not None:
            if must_match:
                self._check_match(reuse)
            taken = self._take_over(reuse)
            if taken is not None:
                return taken
            if must_match and not self.is_real:  # another batch may need more; the budget is what counts
                raise PlanMismatchError(
                    "the plan's decisions break the budget on this step: plan again, or pass replan=True"
                )
        options = self.options
        made = make_plan(
            self.graph,
            self.costs,
            budget=options.budget,
            activation_budget=options.activation_budget,
            at_least_bytes=options.at_least_bytes,
            origin=self.origin,
            surroundings=self.around,
            host=self.host,
            progress=options.progress,
            compare=False,
            propose=self._cheapest,
        )
        made = with_kept(with_modules(made, self._ways, self.host), self.graph, self.regions)
        return self._compared(made) if options.compare else made

    @timings.stage("solving")
    def _cheapest(self, problem: Problem) -> Solution:
        if problem.host is None:
            return cheapest(problem, self.regions, self._clock(), self.options.progress)
        found = cheapest_with_offload(problem, self.regions, self._clock(), self.options.progress)
        self._ways = found.ways
        return found.solution

    def _clock(self) -> Clock:
        options = self.options
        effort = Effort(
            time_limit_seconds=options.time_limit_seconds, deterministic=options.deterministic, seed=options.seed
        )
        return effort.clock()

    def _check_match(self, plan: Plan) -> None:
        """Refuse a plan of something else; a step that depends on its data need not be the same twice."""
        origin = self.origin
        if self.is_real:
            ours = {key: value for key, value in origin.fingerprint.items() if key not in ("graph", "operations")}
            if all(plan.fingerprint.get(key) == value for key, value in ours.items()):
                return
        check_match(plan, origin)

    def _take_over(self, plan: Plan) -> Plan | None:
        """Carry the choice of modules over, if they and what they keep are there and the step keeps the budget."""
        ways = ways_in(plan, self.regions)
        if ways is None:
            return None
        schedule = schedule_of(self.graph, ways)
        options = self.options
        problem = make_problem(
            self.graph, self.costs, budget=options.budget, activation_budget=options.activation_budget, host=self.host
        )
        if schedule.offloads and (self.host is None or self._sent_bytes(schedule) > self.host.budget_bytes):
            return None
        evaluation = problem.evaluate(schedule)
        unneeded = bool(ways) and problem.baseline.peak_bytes <= problem.budget_bytes
        after_bytes = optimizer_peak_bytes(self.graph, self.around) - self.graph.total_static_bytes
        if max(evaluation.peak_bytes, after_bytes) > problem.budget_bytes or unneeded:
            return None
        same = plan.fingerprint.get("graph") == self.origin.fingerprint["graph"]
        solution = Solution(
            solver=plan.solver if same else f"{NAME} (reused)",
            schedule=schedule,
            peak_bytes=evaluation.peak_bytes,
            recompute_seconds=evaluation.added_seconds,
            lower_bound_seconds=min(plan.lower_bound_seconds, evaluation.added_seconds) if same else 0.0,
        )
        taken = plan_from_solution(problem, solution, origin=self.origin, surroundings=self.around, compare=False)
        return with_kept(with_modules(taken, ways, self.host), self.graph, self.regions)

    def _sent_bytes(self, schedule: Schedule) -> int:
        return sum(self.graph.values[offload.value].size_bytes for offload in schedule.offloads)

    # For the report.

    def _compared(self, plan: Plan) -> Plan:
        """Set the plan beside other choices of modules."""
        problem = make_problem(self.graph, self.costs, budget=plan.budget_bytes, host=self.host)
        ways = (ways_of if self.host is None else offloading_ways)(self.regions, self.graph, self.costs)
        chooser = Chooser(problem, ways, self._clock(), self.options.progress)
        lowest = problem.evaluate(chooser.schedule(chooser.lowest()))
        smallest_bytes = min(lowest.peak_bytes + self.graph.total_static_bytes, plan.peak_bytes)
        blocks = set(find_layers(self.graph).blocks)
        layers = [region for region in self.regions if region.module in blocks]
        schedule = plan.schedule_for(self.graph)
        return replace(
            plan,
            details=step_details(problem, schedule, problem.evaluate(schedule)),
            minimum_feasible_peak_bytes=max(smallest_bytes, plan.optimizer_peak_bytes),
            baselines=(
                self._row("none", [], plan),
                self._row("every layer", layers, plan),
                self._row("every second layer", layers[::2], plan),
                BaselineRow(
                    name="this plan",
                    peak_bytes=plan.peak_bytes,
                    overhead=plan.overhead,
                    seconds=plan.solve_seconds,
                    fits=True,
                ),
            ),
        )

    def _row(self, name: str, regions: list[Region], plan: Plan) -> BaselineRow:
        if name != "none" and not regions:
            return BaselineRow(name=name, reason="the model has no repeated blocks that can be checkpointed")
        evaluation = simulate(self.graph, self.costs, schedule_of(self.graph, regions))
        peak_bytes = evaluation.peak_bytes + self.graph.total_static_bytes
        return BaselineRow(
            name=name,
            peak_bytes=peak_bytes,
            overhead=plan.relative(evaluation.recompute_seconds),
            seconds=0.0,
            fits=peak_bytes <= plan.budget_bytes,
        )


def _notes(trace: Trace) -> Iterator[Finding]:
    if trace.is_real:
        yield Finding(
            rule="recorded-for-real",
            evidence="a real step was recorded: what the model runs, or what its kernels keep, is known only with data",
            cause="another batch may need more, or less, than is predicted",
            fix="plan with a batch of the kind that needs most, and leave some room in the budget",
        )
    if opaque := sorted(
        {str(run.node.target) for run in trace.runs if is_opaque(run.node.target) and run.workspace_bytes is None}
    ):
        yield Finding(
            rule="workspace-unknown",
            evidence=", ".join(opaque),
            cause="the workspace of these kernels cannot be measured alone, and counts as none",
            fix="verify the plan, and leave room in the budget for what it shows",
        )
