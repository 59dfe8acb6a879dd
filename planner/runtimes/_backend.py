"""A backend for ``torch.compile`` whose graphs share one budget.

Which graphs Dynamo makes of a program is known only after one step. So each graph first runs with eager kernels under
its lowest known plan. At the next call with no saved activations waiting, every graph gets its share of the budget
(:mod:`planner.plans.budget_split`), is planned for it, and compiled. One graph may have several plans, keyed by the
calls whose saved activations were live when it was called.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from planner.analysis.study import Study
from planner.capture.failures import explain_forward
from planner.capture.inductor_internals import draft_with_inductor, settings_of, with_settings, without_plan
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import Backend as CapturingBackend
from planner.capture.joint_capture import Stopped, differentiable_outputs
from planner.capture.model_facts import of_model
from planner.capture.pieces import Piece, model_of, numbers_among
from planner.capture.state_restore import random_states_kept
from planner.capture.torch_internals import FakeTensor, entered
from planner.common.options import AUTO, HELD, Budget
from planner.common.units import format_bytes, format_percent, parse_size, round_up
from planner.errors import InfeasibleBudgetError, PlannerError, RuntimeUnsupportedError, UsageError
from planner.findings.finding import Finding, Severity
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.static_memory import LossMemory
from planner.plans.budget_split import Call, Needs, calls_in, fraction_that_fits, least_bytes, needs_of
from planner.plans.plan import Plan
from planner.rewrite.graphs import extract_fwd_bwd
from planner.runtimes._calls import weakly
from planner.runtimes._gradients import planned_node, watched
from planner.runtimes._observed import trained
from planner.runtimes.inductor import InductorRuntime, check_can_compile
from planner.session.capture_progress import log_progress
from planner.session.step import Options, PlannedStep, lower_as_run, study_lowered
from planner.session.step_planning import plan_step

RUNTIMES = ("inductor", "graph")
"""Runtimes that a backend can use."""

_MOST_CALLS = 512
"""More calls than a step has open at once; beyond it, the loop leaks graphs."""


class Program:
    """A graph at certain sizes: its memory, and the eager code that first runs it."""

    def __init__(self, model: nn.Module, piece: Piece, settings: dict[str, Any], name: str) -> None:
        self.model, self.piece, self.settings, self.name = model, piece, settings, name

    def look(self, options: Options) -> bool:
        """Compute the program's lowest peak and its peak without recompute; False if nothing requires gradients."""
        if options.runtime.name == "inductor":
            check_can_compile(self.model, options)
        seen: list[Study] = []

        def lowest(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
            step = lower_as_run(self.model, joint, options)
            study = study_lowered(self.model, step, options)
            schedule = _lowest(study, options)
            seen.append(study)
            self.first_needs = needs_of(study.graph, study.costs, schedule)
            return extract_fwd_bwd(step.lowered, study.ways.carried_out(schedule), study.ways.over)

        self.first_run = self._compile(lowest)
        if not seen:
            return False
        study = seen[0]
        if options.runtime.name == "inductor":  # whose graphs are others, and hold other tensors
            study = self._as_inductor_has_it(options)
        keep_all = Schedule.keep_all(study.graph)
        self.lowest = needs_of(study.graph, study.costs, _lowest(study, options))
        self.whole = needs_of(study.graph, study.costs, keep_all)
        self.alignment_bytes = study.graph.alignment_bytes
        self.resident_bytes = study.graph.total_static_bytes - study.graph.static_bytes["inputs"]
        left = sum(v.size_bytes for v in study.graph.values if v.retained and v.kind in ("gradient", "output"))
        passed_on = (t for t in self.piece.inputs if t.requires_grad and not t.is_leaf)
        self.left_bytes = max(0, left - sum(round_up(t.nbytes, self.alignment_bytes) for t in passed_on))
        return True

    def _as_inductor_has_it(self, options: Options) -> Study:
        def stop(joint: JointGraph) -> Any:
            raise Stopped(study_lowered(self.model, lower_as_run(self.model, joint, options), options))

        try:
            self._compile(stop, compiler=lambda partition: partial(draft_with_inductor, partition))
        except Stopped as stopped:
            return stopped.args[0]
        raise AssertionError("a program that has a backward has one for Inductor too")

    def _compile(self, partition: Any, **options: Any) -> Callable[..., Any]:
        captured = CapturingBackend(partition, choose_outputs=differentiable_outputs, finish=watched, **options)
        with explain_forward(self.model), with_settings(self.settings), self.piece.surroundings():
            return captured(self.piece.program, self.piece.inputs)

    def own_inputs(self, given: Sequence[Any]) -> list[torch.Tensor]:
        """Return a call's inputs other than the tensors of its model."""
        pairs = zip(self.piece.positions, self.piece.inputs, strict=True)
        return [given[at] for at, known in pairs if isinstance(known, FakeTensor)]

    def planned(self, options: Options) -> Made:
        """Plan and compile the program."""
        with entered(of_model(self.model, *self.piece.inputs)), random_states_kept():
            if options.runtime.name == "inductor":
                runtime = InductorRuntime(self.model, options)
                run = self._compile(runtime.partition, compiler=runtime.compiler)
                step = runtime.step
            else:
                steps: list[PlannedStep] = []

                def partition(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
                    steps.append(plan_step(self.model, joint, options))
                    return extract_fwd_bwd(steps[-1].lowered, steps[-1].schedule, steps[-1].over)

                run = self._compile(partition)
                step = steps[-1]
        assert step is not None
        loss, plan = options.loss or LossMemory(), step.plan
        needs = needs_of(step.study.graph, step.study.costs, plan.schedule_for(step.study.graph))
        peak_bytes = plan.peak_bytes - plan.total_static_bytes
        needs = Needs(
            kept_bytes=needs.kept_bytes - loss.working_bytes - loss.held_bytes,
            forward_bytes=needs.forward_bytes if needs.peak_bytes == peak_bytes else peak_bytes,
            backward_bytes=(needs.backward_bytes if needs.peak_bytes == peak_bytes else peak_bytes) - loss.held_bytes,
        )
        return Made(plan, run, needs, peak_bytes, options.loss)


def _lowest(study: Study, options: Options) -> Schedule:
    problem = Problem(graph=study.graph, costs=study.costs, budget_bytes=0)
    return study.lowest(problem, effort=options.search)


@dataclass(frozen=True)
class Made:
    """A planned program and its code."""

    plan: Plan
    run: Callable[..., Any]
    needs: Needs
    """Memory of the program alone."""
    peak_bytes: int
    """Peak including the calls after it."""
    loss: LossMemory | None
    """Memory of the calls after it."""

    def peak_with(self, loss: LossMemory | None) -> int:
        """Return the peak if other calls come after it."""
        if loss == self.loss:
            return self.peak_bytes
        loss = loss or LossMemory()
        return self.needs.followed_by(loss.working_bytes, loss.held_bytes)


class Backend:
    """A ``torch.compile`` backend; made by :func:`planner.backend`."""

    def __init__(self, options: Options) -> None:
        assert options.budget.size is not None
        # Outputs of a graph go to the code between graphs, which is not observed.
        self.options = trained(options, outputs=HELD) if options.training.outputs == AUTO else options
        self._budget_bytes = parse_size(options.budget.size)
        self.reset()

    def reset(self) -> None:
        """Forget all graphs, as ``torch.compiler.reset()`` does."""
        self._loose = nn.Module()
        """Holds parameters of programs that belong to no module."""
        self._first: dict[Any, _Call] = {}
        self._held: list[_Held] = []
        self._is_new = False
        self._count = 0

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans in force, by the names of their graphs and the numbers of their calls, in the order of these."""
        found: dict[str, Plan] = {}
        seen = Counter[str]()
        for call in self._calls():
            name = call.program.name
            seen[name] += 1
            if call.made is not None:
                found[f"{name}, call {seen[name]}" if seen[name] > 1 else name] = call.made.plan
        return found

    def __str__(self) -> str:
        plans = self.plans
        rows = [
            f"  {name}: {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}, "
            f"+{format_percent(plan.overhead)} step time, {len(plan.recomputations)} recomputations"
            for name, plan in plans.items()
        ]
        graphs = f"{len(plans)} planned graph{'s' * (len(plans) != 1)}"
        return "\n".join([f"{graphs} under one budget of {format_bytes(self._budget_bytes)}", *rows])

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], **asked: Any) -> Callable[..., Any]:
        """Accept a graph that Dynamo captured, with the ``mode`` and ``options`` that ``torch.compile`` was given.

        Our errors are raised by its first call: Dynamo would wrap them here.
        """
        try:
            settings = self._settings(**asked)
        except PlannerError as error:
            return partial(_refuse, error)
        if differentiable_outputs(graph_module):
            self._count += 1
            graph = _Graph(self, graph_module, settings, f"graph {self._count}")
            return lambda *given: self.run(graph, given)
        return without_plan(graph_module, example_inputs, settings) if self._is_compiled else graph_module.forward

    @property
    def _is_compiled(self) -> bool:
        return self.options.runtime.name == "inductor"

    def _settings(self, mode: str | None = None, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if self._is_compiled:
            return settings_of(mode, options)
        if mode or options:
            raise UsageError("mode and options are Inductor's: leave them out, or take runtime='inductor'")
        return {}

    def _calls(self) -> list[_Call]:
        return [call for call in calls_in(self._first.values()) if isinstance(call, _Call)]

    def run(self, graph: _Graph, given: Sequence[Any]) -> Any:
        """Run a graph: as it was planned, or for the first time."""
        program = graph.program(given)
        if program is None:
            return graph.graph_module.forward(*given)
        if self._is_new and not self._held:
            self._plan_all()
        calls: dict[Any, Any] = self._held[-1].call.after if self._held else self._first
        if program not in calls:
            calls[program] = self._new_call(program, given)
        call = calls[program]
        outputs = call.run(*(given[at] for at in program.piece.positions))
        self._hold(call, given, outputs)
        return outputs

    def model_for(self, given: Sequence[Any]) -> nn.Module:
        """Return the module whose tensors a program is given, or a placeholder module if there is none."""
        model = model_of(given)
        if model is None:
            model = self._loose
            for value in given:
                if isinstance(value, nn.Parameter) and all(value is not known for known in model.parameters()):
                    model.register_parameter(f"parameter {len(list(model.parameters()))}", value)
        return model

    def _new_call(self, program: Program, given: Sequence[Any]) -> _Call:
        """Return a first call of a program at this point of the step, under its lowest known plan."""
        calls = self._calls()
        if len(calls) >= _MOST_CALLS:
            raise RuntimeUnsupportedError(
                f"{_MOST_CALLS} different calls of compiled graphs hold memory for a backward: does the loop keep "
                "outputs of earlier steps, or call the model without torch.no_grad() and without a backward?"
            )
        held = {storage.cdata for one in self._held for storage in one.storages}
        own = (tensor.untyped_storage() for tensor in program.own_inputs(given))
        inputs = {StorageWeakRef(storage).cdata: storage.nbytes() for storage in own}
        own_bytes = sum(round_up(n, program.alignment_bytes) for cdata, n in inputs.items() if cdata not in held)
        call = _Call(
            program=program,
            lowest=program.lowest,
            whole=program.whole,
            own_bytes=own_bytes,
            left_bytes=program.left_bytes,
            run=program.first_run,
            now_bytes=own_bytes + program.first_needs.kept_bytes,
        )
        before_bytes = _resident_bytes([*calls, call]) + sum(one.call.now_bytes for one in self._held)
        needed_bytes = before_bytes + own_bytes + program.first_needs.peak_bytes
        if needed_bytes > self._budget_bytes:
            raise self._infeasible(needed_bytes, f"{program.name} needs at least", program.name)
        self._is_new = True
        return call

    def _hold(self, call: _Call, given: Sequence[Any], outputs: Any) -> None:
        """Count a call's saved activations as live until its backward begins or its graph is freed."""
        node = planned_node([x for x in outputs if isinstance(x, torch.Tensor)])
        if node is None:
            return
        tensors = [x for x in (*given, *outputs) if isinstance(x, torch.Tensor)]
        held = _Held(call, [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors])
        self._held.append(held)
        release = weakly(self.release, held)
        node.register_prehook(lambda _gradients: release())
        weakref.finalize(node, release)

    def release(self, held: _Held) -> None:
        """Stop counting a call's saved activations."""
        self._held = [one for one in self._held if one is not held]

    def _plan_all(self) -> None:
        """Split the budget over all calls, and plan those whose share changed."""
        needed_bytes = least_bytes(self._first.values())
        free_bytes = self._budget_bytes - _resident_bytes(self._calls())
        if needed_bytes > free_bytes:
            needed_bytes += self._budget_bytes - free_bytes
            raise self._infeasible(needed_bytes, "its graphs, as they are compiled, need at least", "the step")
        fraction = fraction_that_fits(self._first.values(), free_bytes)
        for call in self._first.values():
            self._plan(call, free_bytes, fraction)
        self._is_new = False

    def _plan(self, call: _Call, free_bytes: int, fraction: float) -> None:
        """Plan the calls after this one first: what they take is part of this call's problem."""
        after: list[Any] = list(call.after.values())
        for later in after:
            self._plan(later, free_bytes - call.kept_bytes(fraction), fraction)
        left_bytes = call.left_after_bytes
        working_bytes = max([0, *(later.demand_bytes - left_bytes for later in after)])
        loss = LossMemory(working_bytes=working_bytes, held_bytes=left_bytes, is_known=True) if after else None
        room_bytes = free_bytes - call.own_bytes
        asked = room_bytes, loss
        if call.made is None or call.asked != asked:
            # What runs later fits here too: equal blocks share their code.
            equal = (c.made for c in calls_in(after) if isinstance(c, _Call) and c.program is call.program)
            fitting = (made for made in equal if made is not None and made.peak_with(loss) <= room_bytes)
            call.use(next(fitting, None) or self._made(call, room_bytes, loss, fraction))
            call.asked = asked
        assert call.made is not None
        call.demand_bytes = call.own_bytes + call.made.peak_with(loss)

    def _made(self, call: _Call, room_bytes: int, loss: LossMemory | None, fraction: float) -> Made:
        options = replace(self.options, budget=Budget(activations=max(1, room_bytes)), loss=loss)
        with log_progress(type(call.program.model).__name__) as done:
            made = call.program.planned(options)
            done(f"{call.program.name} of {self._count}", made.plan)
        noted = (*made.plan.warnings, self._note(call, fraction))
        return replace(made, plan=replace(made.plan, warnings=noted))

    def _note(self, call: _Call, fraction: float) -> Finding:
        count = len(self._calls())
        return Finding(
            rule="share-of-budget",
            severity=Severity.NOTE,
            evidence=f"{call.program.name}: {count} call{'s' * (count != 1)} of compiled graphs share "
            f"{format_bytes(self._budget_bytes)}",
            cause=f"each may go {format_percent(fraction)} of the way from its lowest known peak to its peak without "
            "recompute, less what others hold meanwhile",
            fix="nothing; fewer graph breaks leave more to choose from" if count > 1 else "nothing",
        )

    def _infeasible(self, needed_bytes: int, what: str, operation: str) -> InfeasibleBudgetError:
        return InfeasibleBudgetError(
            f"no plan fits {format_bytes(self._budget_bytes)}: with all that is resident, {what} "
            f"{format_bytes(needed_bytes)} ({needed_bytes} bytes); raise the budget, or make the batch smaller"
            + (", or try runtime='graph'" if self._is_compiled else ""),
            minimum_feasible_peak_bytes=needed_bytes,
            operation=operation,
        )


def _refuse(error: PlannerError, *_given: Any) -> Any:
    raise error.with_traceback(None)


def _resident_bytes(calls: Iterable[_Call]) -> int:
    """Return the resident bytes around all calls: for each model the most that any of its programs knows of."""
    resident: dict[nn.Module, int] = {}
    for call in calls:
        known = resident.get(call.program.model, 0)
        resident[call.program.model] = max(known, call.program.resident_bytes)
    return sum(resident.values())


@dataclass(eq=False)
class _Graph:
    """A graph as Dynamo cut it out, whatever its sizes."""

    backend: Backend
    graph_module: fx.GraphModule
    settings: dict[str, Any]
    name: str
    programs: dict[Any, Program | None] = field(default_factory=dict)
    """By sizes, where those vary; None where nothing needs gradients."""

    @cached_property
    def _varies(self) -> bool:
        values = (node.meta.get("example_value") for node in self.graph_module.graph.find_nodes(op="placeholder"))
        return bool(self._numbers) or any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in values)

    @cached_property
    def _numbers(self) -> list[int]:
        return numbers_among(self.graph_module)

    def _sizes(self, given: Sequence[Any]) -> Any:
        """Return the sizes and numbers that code depends on and Dynamo's guards let vary."""
        sizes = [x.shape if isinstance(x, torch.Tensor) else x for x in given]
        return (*sizes, *(given[at].item() for at in self._numbers))

    def program(self, given: Sequence[Any]) -> Program | None:
        """Return the program for the sizes of a call."""
        sizes = self._sizes(given) if self._varies else ()
        if sizes not in self.programs:
            most = self.backend.options.runtime.maximum_shapes
            if len(self.programs) >= most:
                raise RuntimeUnsupportedError(
                    f"{self.name} was called with {most} sets of sizes, each of which needs code of its own: pad or "
                    "bucket the inputs, or pass runtime=Runtime(maximum_shapes=...)"
                )
            model = self.backend.model_for(given)
            with entered(of_model(model, *given)), random_states_kept():
                piece = Piece.of(self.graph_module, given, model)
                name = f"{self.name}{f', sizes {len(self.programs) + 1}' if self.programs else ''}"
                program = Program(model, piece, self.settings, name)
                self.programs[sizes] = program if program.look(self.backend.options) else None
        return self.programs[sizes]


@dataclass(eq=False, kw_only=True)
class _Call(Call):
    """A call of a program, with the code that runs it."""

    program: Program
    run: Callable[..., Any]
    now_bytes: int
    """Bytes held for its backward by the code that runs now, inputs included."""
    made: Made | None = None
    asked: Any = None
    """What it was planned for."""
    demand_bytes: int = 0
    """Peak of this call and all calls after it."""

    def use(self, made: Made) -> None:
        """Run this plan's code from now on."""
        self.made, self.run, self.now_bytes = made, made.run, self.own_bytes + made.needs.kept_bytes


@dataclass(eq=False, frozen=True)
class _Held:
    """A call whose backward is still to come."""

    call: _Call
    storages: list[StorageWeakRef]
    """Storages of its inputs and outputs."""
