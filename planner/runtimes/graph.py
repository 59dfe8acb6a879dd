"""Runtime ``graph``: the whole model as one planned forward graph and one backward graph, with eager kernels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import fx, nn

from planner.analysis.eager_baseline import eager_step
from planner.analysis.study import SearchBeside, Study, is_worth_it
from planner.capture import joint_capture
from planner.capture import torch_internals as internals
from planner.capture.branches import OtherBranchError
from planner.capture.failures import explain_failures
from planner.capture.inputs import Inputs, Varying, check_plannable, varying_dimensions
from planner.capture.joint import JointGraph, reach_of
from planner.capture.model_facts import is_sharded
from planner.capture.planned_call import forwards
from planner.capture.programs import Program
from planner.capture.symbolic import Sizes
from planner.common.options import AUTO, Offload
from planner.errors import InfeasibleBudgetError, RuntimeUnsupportedError
from planner.plans.plan import Plan
from planner.plans.reuse import is_reused
from planner.rewrite.graphs import extract_fwd_bwd
from planner.runtimes._calls import PlannedCalls, RuntimeOfCalls, situation_of, weakly
from planner.runtimes._gradients import LateGradients, watch_backward
from planner.runtimes._sized import ANY, NEAR, InputSizes, SizedPrograms, elements, sizes_of
from planner.runtimes._whole_step import awaiting
from planner.session.capture_progress import log_progress, one_at_a_time
from planner.session.sized import SizedStep, UnknownSizeError
from planner.session.step import Options, PlannedStep, called_with, captured, plan_study
from planner.session.step_planning import plan_step

Made = TypeVar("Made", Plan, PlannedStep)

_OFTEN = 8
"""A warning is given after this many captures in a row."""

_ASKED = ("budget", "search", "offload")

_AT_ONCE_SECONDS = 1.0
"""For the search that the first step waits for."""

_ENOUGH = 0.002
"""Gap to the bound, as a share of the step, at which planning of later sizes stops: training waits for it."""


class PlansBySize:
    """The plans of one wrapped model, by the input sizes that they were solved for.

    A plan that keeps the budget for large inputs nearly always keeps it for smaller ones. So new sizes first try the
    plan of the nearest larger sizes (by number of elements): of the plans that fit, it recomputes least. A given plan,
    whose sizes are unknown, is tried if there is no larger one.
    """

    def __init__(self, given: Plan | None = None, *, is_kept: bool = False) -> None:
        self._is_kept = is_kept
        """Whether smaller sizes must run the given plan too."""
        self._plans: dict[InputSizes, Plan] = {ANY: given} if given is not None else {}
        self.largest: float = math.inf if given is not None else 0
        """The largest number of elements that there is a plan for."""

    def nearest(self, sizes: InputSizes) -> Plan | None:
        """Return the plan of the nearest size that is not smaller, else of the largest."""
        nearest = self._nearest(sizes)
        return None if nearest is None else self._plans[nearest]

    def near(self, sizes: InputSizes) -> Plan | None:
        """Return that plan if it is for sizes that are little larger, or unknown; else None."""
        nearest = self._nearest(sizes)
        is_far = nearest not in (None, ANY) and elements(sizes) < NEAR * elements(nearest)
        return None if is_far and not self._is_kept else self.nearest(sizes)

    def _nearest(self, sizes: InputSizes) -> InputSizes | None:
        if sizes in self._plans:
            return sizes
        least = elements(sizes)
        above = [known for known in reversed(self._plans) if elements(known) >= least]
        return min(above, key=elements) if above else max(self._plans, key=elements, default=None)

    def add(self, sizes: InputSizes, plan: Plan) -> None:
        """Store a plan, unless it is that of sizes that are little larger."""
        self.largest = max(self.largest, elements(sizes))
        if not is_reused(plan) or self.near(sizes) is None:
            self._plans[sizes] = plan


class GraphRuntime(PlannedCalls):
    """What ``model(...)`` runs while a plan is in force.

    The first call with gradients captures the model, plans, and writes the graphs; later calls with the same input
    sizes run them. A second set of sizes is captured with symbols for the dimensions that vary. Other sizes replace
    the symbols by numbers, and reuse an existing plan if the simulator says that it fits. Whatever changes the graph
    is captured again: a size that takes another branch, added modules, parameters or hooks, another ``requires_grad``
    or mode. Calls without gradients run the model unplanned. ``compiler`` makes code of the planned graphs; see
    :class:`planner.capture.joint_capture.Backend`.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        compiler: internals.Compiler = internals.aot_backend,
        **settings: Any,
    ) -> None:
        super().__init__(model, options, **settings)
        self._plans = PlansBySize(self.plan, is_kept=self._must_match)
        self._graphs = self._generation = 0
        """How many graphs were captured, and how often options changed: a program of earlier options is made again."""
        self.compiler = compiler
        self._completed_for: Any = None
        self._sizes: list[list[torch.Size]] = []
        """Sizes of calls that ran: a dimension seen in two sizes is captured as a symbol from then on."""
        self._may_vary = compiler is internals.aot_backend
        """Whether varying sizes are captured as symbols."""
        self._numbers: dict[str, float] = {}
        """Python numbers that the program depends on, by Dynamo's names, with their values at the capture."""
        self._sized: dict[fx.Graph, SizedPrograms] = {}
        """By the symbolic graph that was captured."""
        self._inputs: Inputs | None = None
        """Inputs of the current call."""
        self._in_hooks = is_sharded(model)
        """Whether FSDP2's hooks run around the graphs, which then replace the model's ``forward`` alone."""
        self._own_call = model.forward if self._in_hooks else internals.call_implementation(model)
        self._expected: list[int] | None = None
        self._beside: tuple[SearchBeside, PlannedStep] | None = None
        """The search for a better plan, and the step that it is for."""
        self._searched: PlannedStep | None = None
        """The step for which a better plan was found, to be taken at the next call."""
        self._is_ahead = False
        """Whether a call is planned and does not run."""
        self._in_a_row = 0
        """How many calls in a row, up to the last, were captured."""
        self._changes = ""
        """What is no longer so, if a capture is one too many."""
        self._calls = [self._new_call()]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the known program for a call, or capture one."""
        if not self._in_hooks:
            return self._run(*args, **kwargs)
        with forwards({self.model: self._run}):
            return internals.call_implementation(self.model)(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._inputs = Inputs(args, kwargs)
        try:
            result = self._known(args, kwargs)
            if result is joint_capture.NOT_CAPTURED and (varying := marked(self._inputs)):
                with internals.without_dynamic_marks(varying):  # guards do not know them: what is captured has none
                    result = self._known(args, kwargs)
            if result is not joint_capture.NOT_CAPTURED:
                self._in_a_row = 0
                return result
            with one_at_a_time:
                return self._captured(self._inputs)
        finally:
            self._inputs = None

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the known program for a call, or return ``NOT_CAPTURED``."""
        for call in self._calls:
            with suppress(OtherBranchError):  # raised before anything was run
                result = call.known(args, kwargs)
                if result is not joint_capture.NOT_CAPTURED:
                    return result
        return joint_capture.NOT_CAPTURED

    def _captured(self, inputs: Inputs) -> Any:
        """Capture, plan and run a new kind of call."""
        check_plannable(self.model, inputs)
        is_often = self._in_a_row == _OFTEN
        self._changes = self._what_changes(inputs) if is_often or self._is_at_limit else ""
        if is_often:
            warnings.warn(
                f"each of the last {_OFTEN} calls of {type(self.model).__name__} had to be captured again, as has this "
                f"one{self._changes}. What its forward depends on must be the same in most calls; runtime='modules' "
                "captures nothing",
                stacklevel=8,
            )
        self._in_a_row += 1
        self._complete_for(inputs)
        # Dimensions that vary, or are marked.
        of_marks = ((tensor, internals.dynamic_dimensions(tensor)) for tensor in marked(inputs))
        symbolic = [*varying_dimensions(inputs, self._sizes), *of_marks] if self._may_vary else []
        graphs = self._graphs
        changing = internals.varying_numbers(self._numbers) if self._may_vary else nullcontext()
        shown = log_progress(type(self.model).__name__, "captured")
        with shown as done, internals.without_dynamic_marks(marked(inputs)), changing, explain_failures(self.model):
            result = self._captured_by_one(inputs, symbolic)
            sizes = [tensor.shape for tensor in inputs.tensors()]
            if sizes not in self._sizes:
                self._sizes.append(sizes)
            if self._graphs != graphs:
                done(self._why(symbolic), self.plan)
            return result

    @property
    def _is_at_limit(self) -> bool:
        return self._graphs >= self.options.runtime.maximum_shapes

    def _what_changes(self, inputs: Inputs) -> str:
        calls = (one for call in reversed(self._calls) for one in (call.fixed, call.sized))
        found = (call.difference(inputs.args, inputs.kwargs) for call in calls)
        what = next(filter(None, found), "")
        return f": it is no longer true that {what}" if what else ""

    def _captured_by_one(self, inputs: Inputs, symbolic: Sequence[Varying]) -> Any:
        """Capture under the first call whose branches hold for these inputs, or under a new one."""
        for call in self._calls:
            with suppress(OtherBranchError):
                return self._capture(inputs, call, symbolic)
        self._calls.append(self._new_call())
        return self._capture(inputs, self._calls[-1], symbolic)

    def _why(self, symbolic: Sequence[Varying]) -> str:
        """Say why the model was captured."""
        if symbolic:
            count = sum(len(dimensions) for _, dimensions in symbolic)
            of_inputs = "1 dimension of the inputs varies" if count == 1 else f"{count} dimensions of the inputs vary"
            return f"{of_inputs}, as symbols from now on"
        return "the first call" if self._graphs == 1 else "a call unlike the earlier ones"

    def _capture(self, inputs: Inputs, call: joint_capture.CallOfAnySize, symbolic: Sequence[Varying]) -> Any:
        result = call.captured(inputs, symbolic)
        self._may_vary = self._may_vary and call.may_vary
        return result

    def _complete_for(self, inputs: Inputs | None) -> None:
        if inputs is not None and (situation := situation_of(self.model, inputs)) != self._completed_for:
            self.complete_options(inputs)
            self._completed_for = situation

    def _new_call(self) -> joint_capture.CallOfAnySize:
        backend = joint_capture.Backend(
            self.partition,
            choose_outputs=self._choose_outputs,
            finish=self._finish,
            make_program=self._program,
            compiler=self.compiler,
        )
        return joint_capture.CallOfAnySize(self.model, self._own_call, backend)

    def plan_for(self, inputs: Inputs) -> Plan:
        """Capture and plan a call ahead of it: the next one like it runs at once."""
        check_plannable(self.model, inputs)
        with patch.object(self, "_is_ahead", True):
            joint_capture.until_stopped_by(self.model, lambda: self.run(inputs.args, inputs.kwargs))
        assert self.plan is not None
        return self.plan

    def plan_anew(self, options: Options) -> bool:
        """Plan under other options from the next call on, with the graphs that were captured; Inductor's are code."""
        if self.compiler is not internals.aot_backend or not self._graphs:
            return False
        self.options, self._completed_for, self._generation = options, None, self._generation + 1
        self._plans, self._sized, self._beside, self._searched = PlansBySize(), {}, None, None
        return True

    @property
    def is_searching(self) -> bool:
        """Whether a background search for a better plan is running."""
        return self._beside is not None

    def partition(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan one captured graph, and write its forward and backward."""
        step = self._plain(joint)
        return extract_fwd_bwd(step.lowered, step.schedule, step.over)

    def _program(self, joint: JointGraph, given: Sequence[Any]) -> Program:
        """Plan one captured graph, or one size of a symbolic capture, and return what runs it."""
        with log_progress(type(self.model).__name__):
            if joint.varies:
                if joint.graph not in self._sized:
                    # Each of many sizes would have a search beside.
                    plan = partial(self._plain, waits=True)
                    self._sized[joint.graph] = SizedPrograms(self.model, plan, self._followed, self._entering)
                return self._sized[joint.graph].program(joint, given)
            halves = self.partition(joint)
            assert self.plan is not None
            forward, backward = map(internals.boxed, halves)
            return Program(forward, backward, self._entering(self.plan), halves=halves)

    def _plain(self, joint: JointGraph, *, waits: bool = False) -> PlannedStep:
        self._complete_for(self._inputs)
        step = self.planned(joint, waits=waits)
        self._remember(step, joint)
        self.is_confirmed = True
        return step

    def _followed(self, formula: SizedStep, given: Sequence[Any], sizes: Sizes) -> PlannedStep:
        if self.options.loss is not None or self.options.runtime.chunk != 1:
            raise UnknownSizeError("code outside of the graph depends on sizes too")
        input_sizes = sizes_of(formula.inputs(given))
        eager = None
        if elements(input_sizes) > self._plans.largest and isinstance(self.options.eager, Study):
            self._complete_for(self._inputs)  # a percentage of more than before: eager's step is recorded anew
            eager = eager_step(self.options.eager)
        step = formula.planned(given, sizes, eager, partial(self._planned_at, input_sizes))
        self.put_in_force(step.plan)
        return step

    def _planned_at(self, sizes: InputSizes, study: Study) -> Plan:
        options = replace(self.options, search=replace(self.options.search, enough=_ENOUGH))
        plan = self._reusing(sizes, partial(plan_study, study, options))
        self._plans.add(sizes, plan)
        return plan

    def _reusing(self, sizes: InputSizes, plan: Callable[..., Made]) -> Made:
        """Call ``plan`` with a plan to reuse: of sizes that are little larger, or any other if it finds none."""
        near, nearest = self._plans.near(sizes), self._plans.nearest(sizes)
        if near is not None or nearest is None:
            return plan(reuse=near)
        try:
            return plan()
        except InfeasibleBudgetError:
            return plan(reuse=nearest)

    def planned(self, joint: JointGraph, *, waits: bool = False) -> PlannedStep:
        """Plan one captured graph; the first must match a given plan. With ``waits`` the whole search comes first."""
        return self._reusing(self._input_sizes(joint), partial(self._planned_at_once, joint, waits_anyway=waits))

    def _planned_at_once(self, joint: JointGraph, reuse: Plan | None = None, *, waits_anyway: bool) -> PlannedStep:
        """Plan by what is found in a second, and go on searching in a process beside training.

        Where that has found a better plan, the step is planned with it.
        """
        options, search, searched = self.options, self.options.search, self._searched
        offload = options.offload
        plan = partial(plan_step, self.model, joint, reuse=reuse, must_match=self.must_match)
        is_of_others = offload.enabled is True or options.policy is not None or options.runtime.chunk != 1
        waits = search.wait or search.deterministic or search.solver != AUTO or is_of_others or self._must_match
        if waits or waits_anyway or searched is not None:
            self._searched = None
            return plan(options, known=searched)
        try:
            step = plan(replace(options, search=search.within(_AT_ONCE_SECONDS), offload=Offload(False)))
        except InfeasibleBudgetError as error:
            if error.is_proven and not offload.enabled:
                raise
            return plan(options)
        if not is_reused(step.plan) and is_worth_it(step.plan, search, step.study.host_for(offload, search)):
            lowered = replace(step.lowered, joint=replace(joint, inputs=[]))  # training is not to hold them so long
            beside = SearchBeside(step.study, step.plan, {name: getattr(options, name) for name in _ASKED})
            self._beside = beside, replace(step, step=replace(step.step, lowered=lowered))
        return step

    def _remember(self, step: PlannedStep, joint: JointGraph) -> None:
        self.put_in_force(step.plan)
        self._plans.add(self._input_sizes(joint), step.plan)

    def _input_sizes(self, joint: JointGraph) -> InputSizes:
        return sizes_of(called_with(self.model, joint))

    def _choose_outputs(self, graph_module: fx.GraphModule) -> list[int]:
        if self._is_at_limit:  # said here, since a call that fails by itself does not come so far
            raise RuntimeUnsupportedError(
                f"{type(self.model).__name__} was captured {self._graphs} times, and this call needs a graph of its "
                f"own{self._changes}. Pass a tensor instead of a number that changes, pad or bucket inputs whose "
                "sizes change what is run, or pass runtime=Runtime(maximum_shapes=...)"
            )
        possible = joint_capture.differentiable_outputs(graph_module)
        if self._expected is None:
            return joint_capture.loss_outputs(graph_module, self.options.loss)
        return [position for position in self._expected if position in possible] or possible

    def _finish(
        self,
        run: Callable[..., Any],
        graph_module: fx.GraphModule,
        differentiable: Sequence[int],
        joint: JointGraph | None,
    ) -> Callable[..., Any]:
        others = [p for p in joint_capture.differentiable_outputs(graph_module) if p not in differentiable]
        self._graphs += 1
        if joint is None:
            return run  # nothing of it requires gradients: AOTAutograd made no joint graph
        reach = reach_of(joint)
        put_in_force = weakly(
            self._use, self._generation, None if self.compiler is internals.aot_backend else self.plan
        )
        late = None
        if others:
            late = LateGradients(graph_module, joint, others, weakly(self._expect, sorted([*differentiable, *others])))

        def finished(*inputs: Any) -> Any:
            before = late.state() if late else None
            outputs = list(run(*inputs))
            put_in_force()
            watch_backward([outputs[p] for p in differentiable], reach)
            if late is not None:
                for position, output in zip(others, late.attach(before, inputs, outputs), strict=True):
                    outputs[position] = output
            return outputs

        return finished

    def _entering(self, plan: Plan) -> Callable[[], bool | None]:
        """Return what puts a plan in force, as long as it is one of the present options."""
        return weakly(self._use, self._generation, plan)

    def _use(self, generation: int, plan: Plan | None) -> bool:
        if self._beside is not None and plan is self._beside[1].plan and self._beside[0].is_over and not awaiting():
            (beside, step), self._beside = self._beside, None
            if beside.take():
                self._searched, self._plans = step, PlansBySize()
                return False
        if generation == self._generation:
            self.plan = plan or self.plan
            if self._is_ahead:
                raise joint_capture.Stopped(self.plan)
        return generation == self._generation

    def _expect(self, positions: list[int]) -> None:
        """Plan for these outputs from the next call on."""
        self._expected = positions
        self._graphs = 0
        self._calls = [self._new_call()]


def marked(inputs: Inputs) -> list[torch.Tensor]:
    """Return the inputs marked by ``mark_dynamic`` or a relative of it."""
    return [tensor for tensor in inputs.tensors() if internals.is_marked_dynamic(tensor)]


class _Graph(RuntimeOfCalls):
    calls = GraphRuntime
    name = "graph"
    summary = "forward and backward as planned graphs of the whole model"

    def plan(self, model: nn.Module, inputs: Inputs, options: Options, **known: Any) -> Plan:
        check_plannable(model, inputs)
        joint = captured(model, inputs, options)
        return plan_step(model, joint, options, **known).plan


RUNTIME = _Graph()
