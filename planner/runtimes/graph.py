"""Runs the planned forward and backward graphs in place of a model's call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from planner.capture.failures import explain_failures
from planner.capture.inputs import Inputs, check_plannable
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import NOT_CAPTURED, IsolatedCall, capture, differentiable_outputs, expected_losses
from planner.capture.masks import AssumptionBrokenError
from planner.capture.torch_internals import Compiler, aot_backend, call_implementation, without_dynamic_marks
from planner.errors import CaptureError, RuntimeUnsupportedError, UsageError
from planner.plans.plan import Plan
from planner.rewrite.graphs import extract_fwd_bwd
from planner.runtimes._calls import PlannedCalls, StartsCalls
from planner.runtimes._gradients import LateGradients, reach_of, watch_backward
from planner.runtimes._shapes import PlansBySize, Sizes, largest_sizes, marked, with_sizes
from planner.session.step import Options, PlannedStep, called_with, captured
from planner.session.step_planning import plan_step


class GraphRuntime(PlannedCalls):
    """What ``model(...)`` runs while a plan is in force.

    The first call with gradients captures the model, plans, and writes the graphs; later calls with
    the same input sizes run them. Other sizes are captured again, and a plan at hand is carried over if
    the simulator says that it fits. So is whatever else makes the graph another: modules, parameters or
    hooks added, ``requires_grad`` or the mode switched. Calls without gradients run the model as it is. ``compiler``
    makes code of the planned graphs; see :class:`planner.capture.joint_capture.Backend`.
    """

    def __init__(
        self, model: nn.Module, options: Options, *, compiler: Compiler = aot_backend, **settings: Any
    ) -> None:
        super().__init__(model, options, **settings)
        self._plans = PlansBySize(self.plan)
        self._graphs = 0
        self._planned_ahead: set[Sizes] = set()
        self.compiler = compiler
        self._completed_for: list[torch.Size] | None = None
        self._joint: JointGraph | None = None
        self._expected: list[int] | None = None
        self._new_calls()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, planned if gradients are on."""
        if self.runs_plainly():
            return call_implementation(self.model)(*args, **kwargs)
        try:
            result = self._call.known(args, kwargs)
        except AssumptionBrokenError:  # raised before anything was run
            result = self._call_without_assumption.known(args, kwargs)
        return self._captured(args, kwargs) if result is NOT_CAPTURED else result

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model on what is new to it, or marked as dynamic."""
        inputs = Inputs(args, kwargs)
        if not self.is_confirmed:
            check_plannable(self.model, inputs)
        sizes = [tensor.shape for tensor in inputs.tensors()]
        if sizes != self._completed_for:
            self.complete_options(inputs)
            self._completed_for = sizes
        if varying := marked(inputs):
            self._plan_ahead(inputs)
        try:
            # Marks would make sizes symbolic, and planned graphs have fixed ones.
            with without_dynamic_marks(varying), explain_failures(self.model):
                try:
                    return self._call(*args, **kwargs)
                except AssumptionBrokenError:
                    return self._call_without_assumption(*args, **kwargs)
        except CaptureError:
            check_plannable(self.model, inputs)  # what was added since may say it better
            raise

    def _plan_ahead(self, inputs: Inputs) -> None:
        """Plan for the largest sizes that are allowed, so that the decisions are there for all others."""
        sizes = largest_sizes(inputs)
        # What a loss outside needs can be asked only with targets of the same sizes.
        if sizes is None or sizes in self._planned_ahead or self.prepare is not None:
            return
        try:
            joint = capture(self.model, with_sizes(inputs, sizes), compiler=self.compiler)
        except CaptureError as error:
            raise UsageError(
                f"the largest inputs that mark_dynamic allows, {', '.join(map(str, sizes))}, do not run: mark every "
                f"input that grows with them. {error}"
            ) from error
        self._remember(self.planned(joint), joint)
        self._planned_ahead.add(sizes)

    def _new_calls(self) -> None:
        new = partial(
            IsolatedCall,
            self.model,
            call_implementation(self.model),
            self.partition,
            choose_outputs=self._choose_outputs,
            finish=self._finish,
            compiler=self.compiler,
        )
        self._call, self._call_without_assumption = new(), new(assume=False)

    def partition(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan one captured graph, and write its forward and backward."""
        step = self.planned(joint)
        self._remember(step, joint)
        self.is_confirmed = True
        self._joint = joint
        return extract_fwd_bwd(step.lowered, step.schedule, step.over)

    def planned(self, joint: JointGraph) -> PlannedStep:
        """Plan one captured graph; a plan given by the user must match the first."""
        reuse = self._plans.nearest(self._elements(joint))
        return plan_step(self.model, joint, self.options, reuse=reuse, must_match=self.must_match)

    def _remember(self, step: PlannedStep, joint: JointGraph) -> None:
        self.put_in_force(step.plan)
        self._plans.add(self._elements(joint), step.plan)

    def _elements(self, joint: JointGraph) -> int:
        return sum(tensor.numel() for tensor in called_with(self.model, joint))

    def _choose_outputs(self, graph_module: fx.GraphModule) -> list[int]:
        if self._graphs == self.options.maximum_shapes:
            raise RuntimeUnsupportedError(
                f"{type(self.model).__name__} has graphs for {self._graphs} sets of input sizes, and these are new: "
                "each costs a capture. Pad or bucket the inputs to fewer sizes, or raise maximum_shapes of auto_wrap"
            )
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
            self._graphs = 0
            self._new_calls()

        self._graphs += 1
        joint, self._joint = self._joint, None
        plan, late = self.plan, None
        if joint is None:
            return run  # nothing of it requires gradients: AOTAutograd made no joint graph
        reach = reach_of(joint)
        if others:
            late = LateGradients(graph_module, joint, others, lambda: expect([*differentiable, *others]))

        def finished(*inputs: Any) -> Any:
            before = late.state() if late else None
            outputs = list(run(*inputs))
            self.plan = plan
            watch_backward([outputs[p] for p in differentiable], reach)
            if late is not None:
                for position, output in zip(others, late.attach(before, inputs, outputs), strict=True):
                    outputs[position] = output
            return outputs

        return finished


class _Graph(StartsCalls):
    calls = GraphRuntime
    name = "graph"
    summary = "forward and backward as planned graphs of the whole model"

    def plan(
        self, model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
    ) -> Plan:
        begun = time.perf_counter()
        check_plannable(model, inputs)
        joint = captured(model, inputs, options)
        capture_seconds = time.perf_counter() - begun
        plan = plan_step(model, joint, options, reuse=reuse, must_match=must_match).plan
        return replace(plan, capture_seconds=plan.capture_seconds + capture_seconds)


RUNTIME = _Graph()
