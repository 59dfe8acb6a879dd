"""Runs the planned forward and backward graphs in place of a model's call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from planner import rewrite
from planner.capture import (
    capture,
    differentiable_outputs,
    expected_losses,
    isolated_call,
)
from planner.failures import explain_failures
from planner.inputs import Inputs, check_capturable
from planner.joint import JointGraph
from planner.masks import AssumptionBrokenError
from planner.planning import Plan
from planner.runtimes import Prepare
from planner.runtimes._gradients import LateGradients, reach_of, watch_backward
from planner.session import Options, PlannedStep, attention_for, plan_step
from planner.torch_internals import call_implementation, dynamo_settings


class GraphRuntime:
    """What ``model(...)`` runs while a plan is in force.

    The first call with gradients captures the model, plans, and writes the graphs; later calls with
    the same input sizes run them. Other sizes are captured again, and the plan is carried over if
    the simulator says that it fits. Calls without gradients run the model as it is.

    Parameters
    ----------
    model : torch.nn.Module
    options : Options
    plan : Plan, optional
        Decisions to carry out.
    replan : bool
        Whether a plan that does not match may be replaced; otherwise it is refused.
    prepare : callable, optional
        Completes the options for inputs of each new set of sizes: what a loss outside needs depends on them.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        plan: Plan | None = None,
        replan: bool = True,
        prepare: Prepare | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.plan = plan
        self.replan = replan
        self.prepare = prepare
        self._confirmed = False
        self._prepared_for: list[torch.Size] | None = None
        self._joint: JointGraph | None = None
        self._expected: list[int] | None = None
        self._call = self._new_call()
        self._call_without_assumption = self._new_call(assume=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, planned if gradients are on."""
        if not torch.is_grad_enabled():
            return call_implementation(self.model)(*args, **kwargs)
        if not self._confirmed:
            check_capturable(self.model, Inputs(args, kwargs))
        if self.prepare is not None:
            self._prepare_for(Inputs(args, kwargs))
        with dynamo_settings(), explain_failures(self.model):
            try:
                return self._call(*args, **kwargs)
            except AssumptionBrokenError:  # raised before anything was run
                return self._call_without_assumption(*args, **kwargs)

    def stop(self) -> None:
        """Do nothing: the model's parts are as they were."""

    def _prepare_for(self, inputs: Inputs) -> None:
        sizes = [tensor.shape for tensor in inputs.tensors()]
        if self.prepare is not None and sizes != self._prepared_for:
            self.options = self.prepare(inputs)
            self._prepared_for = sizes

    def _new_call(self, *, assume: bool = True) -> Callable[..., Any]:
        return isolated_call(
            self.model, self._partition, choose_outputs=self._choose_outputs, finish=self._finish, assume=assume
        )

    def _partition(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        step = self.planned(joint)
        self.plan = step.plan
        self._confirmed = True
        self._joint = joint
        return rewrite.split(step.lowered, step.schedule)

    def planned(self, joint: JointGraph) -> PlannedStep:
        """Plan one captured graph; a plan given by the user must match the first."""
        must_match = self.plan is not None and not self._confirmed and not self.replan
        return plan_step(self.model, joint, self.options, reuse=self.plan, must_match=must_match)

    def _choose_outputs(self, graph_module: fx.GraphModule) -> list[int]:
        possible = differentiable_outputs(graph_module)
        if self._expected is None:
            return expected_losses(graph_module)
        return [position for position in self._expected if position in possible] or possible

    def _finish(
        self, run: Callable[..., Any], graph_module: fx.GraphModule, differentiable: Sequence[int]
    ) -> Callable[..., Any]:
        others = [p for p in differentiable_outputs(graph_module) if p not in differentiable]

        def expect(positions: Sequence[int]) -> None:
            """Plan for these outputs from the next call on."""
            self._expected = sorted(positions)
            self._call = self._new_call()
            self._call_without_assumption = self._new_call(assume=False)

        joint, self._joint = self._joint, None
        late = None
        if joint is None:
            return run  # nothing of it requires gradients: AOTAutograd made no joint graph
        reach = reach_of(joint)
        if others:
            late = LateGradients(graph_module, others, lambda: expect([*differentiable, *others]))
            late.learn(joint)

        def finished(*inputs: Any) -> Any:
            before = late.state() if late else None
            outputs = list(run(*inputs))
            watch_backward([outputs[p] for p in differentiable], reach)
            if late is not None:
                for position, output in zip(others, late.attach(before, inputs, outputs), strict=True):
                    outputs[position] = output
            return outputs

        return finished


class _Graph:
    name = "graph"
    summary = "forward and backward as planned graphs of the whole model"
    exact_bits = True
    exact_peak = True

    def plan(
        self, model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
    ) -> Plan:
        begun = time.perf_counter()
        if options.progress is not None:
            options.progress("capturing forward and backward")
        joint = capture(model, inputs, attention=attention_for(model, options))
        captured = time.perf_counter() - begun
        plan = plan_step(model, joint, options, reuse=reuse, must_match=must_match).plan
        return replace(plan, capture_seconds=plan.capture_seconds + captured)

    def start(
        self,
        model: nn.Module,
        options: Options,
        *,
        plan: Plan | None = None,
        replan: bool = True,
        prepare: Prepare | None = None,
    ) -> GraphRuntime:
        return GraphRuntime(model, options, plan=plan, replan=replan, prepare=prepare)


RUNTIME = _Graph()
