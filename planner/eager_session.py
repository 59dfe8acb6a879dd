"""From a recorded eager step to a plan of checkpointed modules."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import fx, nn

from planner import timings
from planner.checkpoint_choice import NAME
from planner.checkpoints import schedule_of
from planner.eager_graph import lower_eager
from planner.eager_record import record
from planner.eager_study import EagerStudy
from planner.eager_trace import Trace
from planner.errors import PlanMismatchError
from planner.findings import Finding
from planner.graph import OperationCost
from planner.host import Host, host_of
from planner.inputs import Inputs
from planner.layers import find_blocks
from planner.lowering import LoweredGraph
from planner.module_offload import ways_in, with_modules
from planner.operands import is_opaque
from planner.plan_match import check_match
from planner.plan_parts import PlanOrigin
from planner.planning import Plan, make_problem, plan_from_solution
from planner.problem import Solution
from planner.provenance import kinds_of
from planner.reservation import optimizer_peak_bytes
from planner.selective import with_kept
from planner.session import Options, attention_for, cost, device_spec, fingerprint, problems_of, surroundings_of
from planner.surroundings import LossMemory

_NO_TROUBLE = ("full-backward-hooks",)
"""Rules that an eager step may break."""


def plan_eager(
    model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
) -> Plan:
    """Plan one eager step; see :func:`planner.step_planning.plan_step`."""
    return _Recorded(model, inputs, options).plan(reuse, must_match)


def study_eager(model: nn.Module, inputs: Inputs, options: Options) -> EagerStudy:
    """Record and cost one eager step; see :func:`planner.studying.study`."""
    return _Recorded(model, inputs, options).study(None)


class _Recorded:
    """A recorded step, and the model that it was recorded of."""

    def __init__(self, model: nn.Module, inputs: Inputs, options: Options) -> None:
        self.begun = time.perf_counter()
        if options.progress is not None:
            options.progress("recording a step")
        attention = attention_for(model, options)
        with timings.stage("capture"):
            self.trace = record(model, inputs, has_loss=options.loss is not None, attention=attention)
        self.has_attention_of_here = self.trace.is_real and attention is not None
        self.model, self.options = model, options
        self.tensors = inputs.tensors()
        self.spec = device_spec(model, options.device)
        self.around = surroundings_of(model, self.tensors, self.spec, options, self.blocks)
        self.costs: dict[fx.Node | None, OperationCost] = {None: OperationCost(seconds=0.0)}
        self.origin: PlanOrigin | None = None

    def blocks(self) -> Collection[str]:
        """Give the paths of the blocks."""
        forward = Counter(run.module for run in self.trace.runs[: self.trace.backward])
        return find_blocks(forward, kinds_of(self.model))

    def study(self, least_bytes: int | None) -> EagerStudy:
        """Give the step as plain data; with what its modules could send of so many bytes and more, if any may."""
        options = self.options
        step = lower_eager(
            self.trace,
            self.model,
            self.tensors,
            alignment_bytes=self.spec.alignment_bytes,
            static_bytes=dict(self.around.static_bytes),
            name=options.name or type(self.model).__name__,
            loss=options.loss or LossMemory(),
            on_cpu=self.spec.kind == "cpu",
            least_bytes=least_bytes,
        )
        if self.origin is None:
            self.origin = self._cost(step.lowered)
        costs = [self.costs[node] for node in step.lowered.operation_nodes]
        return EagerStudy(
            graph=step.lowered.graph,
            costs=tuple(
                replace(cost, workspace_bytes=step.workspace_bytes.get(index, cost.workspace_bytes))
                for index, cost in enumerate(costs)
            ),
            origin=self.origin,
            surroundings=self.around,
            device=self.spec,
            regions=step.regions,
            least_bytes=least_bytes,
            seen_for=self.study,
        )

    def _cost(self, lowered: LoweredGraph) -> PlanOrigin:
        """Cost every operation, and say where the step comes from: both are the same whatever modules may send."""
        model, options, trace = self.model, self.options, self.trace
        costing = cost(model, lowered, self.spec, options)
        for node, each in zip(lowered.operation_nodes, costing.costs, strict=True):
            self.costs.setdefault(node, each)
        return PlanOrigin(
            fingerprint=fingerprint(model, lowered, self.spec.name),
            capture_seconds=time.perf_counter() - self.begun,
            cost_model=costing.cost_model,
            device=self.spec.name,
            torch_version=torch.__version__,
            runtime=options.runtime,
            warnings=(
                *costing.warnings,
                *_notes(trace, has_attention_of_here=self.has_attention_of_here),
                *problems_of(
                    model,
                    options,
                    outside_bytes=trace.outside_bytes if trace.outside_bytes > self.spec.alignment_bytes else 0,
                    returned_cache=trace.returned_cache,
                    allowed=_NO_TROUBLE,
                ),
            ),
        )

    def plan(self, reuse: Plan | None, must_match: bool) -> Plan:
        """Take a plan over if it fits, else make one."""
        options = self.options
        host = host_of(self.spec, options.host_budget, at_least=options.offload_at_least) if options.offload else None
        study = self.study(host.least_bytes if host is not None else None)
        if reuse is not None:
            if must_match:
                self._check_match(study, reuse)
            taken = self._take_over(study, host, reuse)
            if taken is not None:
                return taken
            if must_match and not self.trace.is_real:  # another batch may need more; the budget is what counts
                raise PlanMismatchError(
                    "the plan's decisions break the budget on this step: plan again, or pass replan=True"
                )
        return study.plan(
            budget=options.budget,
            activation_budget=options.activation_budget,
            at_least_bytes=options.at_least_bytes,
            strategy=options.strategy,
            time_limit_seconds=options.time_limit_seconds,
            deterministic=options.deterministic,
            seed=options.seed,
            offload=options.offload,
            host_budget=options.host_budget,
            offload_at_least=options.offload_at_least,
            compare=options.compare,
            progress=options.progress,
        )

    def _check_match(self, study: EagerStudy, plan: Plan) -> None:
        """Refuse a plan of something else; a step that depends on its data need not be the same twice."""
        origin = study.origin
        if self.trace.is_real:
            ours = {key: value for key, value in origin.fingerprint.items() if key not in ("graph", "operations")}
            if all(plan.fingerprint.get(key) == value for key, value in ours.items()):
                return
        check_match(plan, origin)

    def _take_over(self, study: EagerStudy, host: Host | None, plan: Plan) -> Plan | None:
        """Carry the choice of modules over, if they and what they keep are there and the step keeps the budget."""
        ways = ways_in(plan, study.regions)
        if ways is None:
            return None
        graph, options = study.graph, self.options
        schedule = schedule_of(graph, ways)
        problem = make_problem(
            graph, study.costs, budget=options.budget, activation_budget=options.activation_budget, host=host
        )
        sent_bytes = sum(graph.values[offload.value].size_bytes for offload in schedule.offloads)
        if schedule.offloads and (host is None or sent_bytes > host.budget_bytes):
            return None
        evaluation = problem.evaluate(schedule)
        unneeded = bool(ways) and problem.baseline.peak_bytes <= problem.budget_bytes
        after_bytes = optimizer_peak_bytes(graph, self.around) - graph.total_static_bytes
        if max(evaluation.peak_bytes, after_bytes) > problem.budget_bytes or unneeded:
            return None
        same = plan.fingerprint.get("graph") == study.origin.fingerprint["graph"]
        solution = Solution(
            solver=plan.solver if same else f"{NAME} (reused)",
            schedule=schedule,
            peak_bytes=evaluation.peak_bytes,
            recompute_seconds=evaluation.added_seconds,
            lower_bound_seconds=min(plan.lower_bound_seconds, evaluation.added_seconds) if same else 0.0,
        )
        taken = plan_from_solution(problem, solution, origin=study.origin, surroundings=self.around, compare=False)
        return with_kept(with_modules(taken, ways, host), graph, study.regions)


def _notes(trace: Trace, *, has_attention_of_here: bool) -> Iterator[Finding]:
    if has_attention_of_here:
        yield Finding(
            rule="attention-of-here",
            evidence="a real step was recorded on this machine, for a device that is not here",
            cause="its attention kernels are those of this machine, which keep other tensors, and more of them",
            fix="plan there, or a model that can be followed without data",
        )
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
