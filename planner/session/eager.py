"""From a recorded eager step to a plan of checkpointed modules."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from torch import fx, nn

from planner.analysis.study import Study
from planner.capture.eager.graph import lower_eager
from planner.capture.eager.record import record
from planner.capture.eager.trace import Trace
from planner.capture.inputs import Inputs, check_device, check_own_checkpointing
from planner.capture.lowering import LoweredGraph
from planner.capture.operands import is_opaque
from planner.common import timings
from planner.findings.finding import Finding
from planner.ir.graph import OperationCost
from planner.ir.static_memory import LossMemory
from planner.measure.devices import device_spec
from planner.plans.plan import Plan, PlanOrigin
from planner.session.step import (
    Options,
    attention_for,
    cost,
    fingerprint,
    origin_of,
    plan_study,
    problems_of,
    static_memory_of,
)

_NO_TROUBLE = ("full-backward-hooks",)
"""Rules that an eager step may break."""


def plan_eager(
    model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
) -> Plan:
    """Plan one eager step; see :func:`planner.session.step.plan_study`."""
    return plan_study(study_eager(model, inputs, options), options, reuse=reuse, must_match=must_match)


def study_eager(model: nn.Module, inputs: Inputs, options: Options) -> Study:
    """Record and cost one eager step; see :func:`planner.session.studying.study`."""
    check_device(model, inputs)
    check_own_checkpointing(model)
    return _Recorded(model, inputs, options).study(None)


class _Recorded:
    """A recorded step, and the model that it was recorded of."""

    def __init__(self, model: nn.Module, inputs: Inputs, options: Options) -> None:
        self.begun = time.perf_counter()
        options.search.tell("recording a step")
        attention = attention_for(model, options)
        with timings.stage("capture"):
            self.trace = record(model, inputs, has_loss=options.loss is not None, attention=attention)
        self.has_attention_of_here = self.trace.is_real and attention is not None
        self.model, self.options = model, options
        self.tensors = inputs.tensors()
        self.spec = device_spec(model, options.target.device)
        self.around = static_memory_of(model, self.tensors, self.spec, options)
        self.costs: dict[fx.Node | None, OperationCost] = {None: OperationCost(seconds=0.0)}
        self.origin: PlanOrigin | None = None

    def study(self, least_bytes: int | None) -> Study:
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
        return Study(
            graph=step.lowered.graph,
            costs=tuple(
                replace(cost, workspace_bytes=step.workspace_bytes.get(index, cost.workspace_bytes))
                for index, cost in enumerate(costs)
            ),
            origin=self.origin,
            static_memory=self.around,
            device=self.spec,
            regions=step.regions,
            least_bytes=least_bytes,
            seen_for=self.study,
            varies=self.trace.is_real,
        )

    def _cost(self, lowered: LoweredGraph) -> PlanOrigin:
        """Cost every operation, and say where the step comes from: both are the same whatever modules may send."""
        model, options, trace = self.model, self.options, self.trace
        costing = cost(model, lowered, self.spec, options)
        for node, each in zip(lowered.operation_nodes, costing.costs, strict=True):
            self.costs.setdefault(node, each)
        return origin_of(
            costing,
            self.spec,
            fingerprint=fingerprint(model, lowered, self.spec.name),
            capture_seconds=time.perf_counter() - self.begun,
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
