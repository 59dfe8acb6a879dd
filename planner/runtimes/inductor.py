"""Runtime ``inductor``: the planned forward and backward of the whole model, compiled by Inductor.

The planned graph is the one after Inductor's decompositions. Fusion removes some of its values, and Inductor orders
kernels itself, so the code's peak differs from the graph's. The code's peak is what counts: Inductor drafts the code
before anything is compiled, and if it exceeds the budget the graph is planned for less. Where fusion differs, sums are
added up in another order.
"""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx, nn

from planner.capture.inductor_internals import (
    Draft,
    OtherCodeError,
    compile_with_inductor,
    draft_with_inductor,
    missing_compiler,
)
from planner.capture.inputs import Inputs, check_plannable
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import Stopped, loss_outputs, until_stopped
from planner.capture.lowering import LoweredGraph
from planner.capture.model_facts import is_fake, of_model
from planner.capture.torch_internals import PartitionFunction
from planner.errors import RuntimeUnsupportedError
from planner.measure.workspace import effort_for
from planner.plans.plan import Plan
from planner.rewrite.graphs import extract_fwd_bwd
from planner.rewrite.inductor_peak import with_code
from planner.runtimes import ReplannedModel
from planner.runtimes._calls import RuntimeOfCalls
from planner.runtimes._code import FREE, Attempt, CodeSearch, DraftedBeforeError, alone, as_compiled
from planner.runtimes.graph import GraphRuntime, PlansBySize
from planner.session.step import Options, PlannedStep, elsewhere_for, lower_step
from planner.session.step_planning import plan_step


class InductorRuntime(GraphRuntime):
    """What ``model(...)`` runs while a plan is in force; see :meth:`planner.runtimes.RuntimePlugin.start`."""

    def __init__(self, model: nn.Module, options: Options, **settings: Any) -> None:
        super().__init__(model, options, compiler=lambda p: partial(self._compiled, p), **settings)
        self.step: PlannedStep | None = None
        """The last planned step."""
        self._fits = False
        self._ahead: list[Draft] = []
        """What was drafted for a call ahead of it."""
        self._search = CodeSearch[list[Draft]]()
        self._instead: GraphRuntime | None = None
        """Runs all calls once Inductor wrote other code than it had drafted."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the compiled code for a call; eager kernels under a plan, if that is not the code that was drafted."""
        if self._instead is None:
            try:
                return super().run(args, kwargs)
            except OtherCodeError as error:
                warnings.warn(f"{error}: {type(self.model).__name__} runs under the runtime 'graph'", stacklevel=5)
            options = replace(self.options, runtime=replace(self.options.runtime, name="graph"))
            self._instead = GraphRuntime(self.model, options, prepare=self.prepare)
        result = self._instead.run(args, kwargs)
        self.plan = self._instead.plan
        return result

    def plan_for(self, inputs: Inputs) -> Plan:
        """Plan one step by its drafted code; nothing is compiled or run."""
        check_plannable(self.model, inputs)

        def drafted(partition: PartitionFunction, graph_module: fx.GraphModule, example_inputs: Any) -> Any:
            self._ahead = self._draft_that_fits(partition, graph_module, example_inputs)
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
        self._plans = PlansBySize(plan, is_kept=self._must_match)
        return plan

    def planned(self, joint: JointGraph, *, waits: bool = True) -> PlannedStep:
        """Plan one captured graph, for less than the budget if its code needs more than the graph."""
        reuse = self.plan if self.must_match else self._plans.near(self._input_sizes(joint))
        self.step = self._search.plan(partial(plan_step, self.model, joint, known=self.step), self.options, reuse)
        return self.step

    def partition(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan one captured graph and write its forward and backward, or write the drafted ones again."""
        if self._fits and self.step is not None:
            lowered = lower_step(self.model, joint, self.options).lowered
            if _reads(lowered) != _reads(self.step.lowered):
                raise OtherCodeError("what is compiled is not the graph that was drafted")
            return extract_fwd_bwd(lowered, self.step.schedule)
        return super().partition(joint)

    def _compiled(self, partition: PartitionFunction, graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        drafts, self._ahead = self._ahead, []
        if drafts and (step := self.step) is not None:
            self._fits = True
            with suppress(OtherCodeError):  # the first call may be another
                run = compile_with_inductor(partition, graph_module, example_inputs, drafts)
                self._fits = False
                self._remember(step, step.lowered.joint)
                return run
        drafts = self._draft_that_fits(partition, graph_module, example_inputs)
        try:
            return compile_with_inductor(partition, graph_module, example_inputs, drafts)
        finally:
            self._fits = False

    def _draft_that_fits(
        self, partition: PartitionFunction, graph_module: fx.GraphModule, example_inputs: Any
    ) -> list[Draft]:
        """Plan and draft until the code keeps the budget and uses most of it."""
        must_match = self.must_match  # planning confirms it
        self.step, self._fits = None, False
        search = self._search = CodeSearch(self.options.search.tell, must_match=must_match)

        def is_enough(drafts: list[Draft]) -> bool:
            step, effort = self.step, effort_for(is_fake=is_fake(self.model))
            assert step is not None
            code = with_code(step.lowered, (), drafts, step.single_costs, effort).graph
            return search.is_enough(Attempt.of(step, drafts, code, [FREE] * len(code.operations)))

        with suppress(DraftedBeforeError):
            drafts = draft_with_inductor(partition, graph_module, example_inputs, is_enough)
            if self.step is None:
                return drafts  # nothing requires gradients: there is no backward to plan
        found = search.found()
        self.step, self._fits = as_compiled(found, alone(self.options) if must_match else self.options), True
        self._remember(self.step, self.step.lowered.joint)
        return found.code


def _reads(lowered: LoweredGraph) -> list[tuple[Any, ...]]:
    """Return what a graph computes from what; Inductor may pad what it has drafted, so that sizes say less."""
    return [(operation.key, operation.inputs, operation.outputs) for operation in lowered.graph.operations]


class Compiles(RuntimeOfCalls):
    """A runtime whose code Inductor writes: results are close, not bit-equal, and the peak is an upper bound."""

    tolerance = 1e-4
    exact_peak = False

    def start(self, model: nn.Module, options: Options, **settings: Any) -> ReplannedModel:
        """Start the calls; see :meth:`planner.runtimes.RuntimePlugin.start`."""
        if of_model(model).type != "meta":  # where it will be is known at its first call
            check_can_compile(model, options)
        return super().start(model, options, **settings)


class _Inductor(Compiles):
    calls = InductorRuntime
    name = "inductor"
    summary = "the same graphs compiled by Inductor: the peak is counted in the code that it writes"
    runs_compiled_parts = True

    def plan(
        self, model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
    ) -> Plan:
        check_can_compile(model, options)
        begun = time.perf_counter()
        options.search.tell("capturing forward and backward")
        plan = InductorRuntime(model, options, plan=reuse, replan=not must_match).plan_for(inputs)
        return replace(plan, capture_seconds=time.perf_counter() - begun - plan.solve_seconds)


def check_can_compile(model: nn.Module, options: Options) -> None:
    """Raise RuntimeUnsupportedError if there is no compiler, or the plan is for a device that is not here."""
    if missing := missing_compiler(of_model(model)):
        raise RuntimeUnsupportedError(f"runtime {options.runtime.name!r} needs {missing}: install it, or use another")
    if elsewhere_for(model, options) is not None:
        raise RuntimeUnsupportedError(
            f"runtime {options.runtime.name!r} plans by the code for the device that the model is on, "
            f"{of_model(model)}, and not for {options.target.device}: "
            "choose runtime 'graph' to plan for a GPU that is not here"
        )


RUNTIME = _Inductor()
