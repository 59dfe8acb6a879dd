"""Runtime ``parts``: the largest modules that can be captured as planned graphs, the rest eager.

Often one line stops the capture of a whole model. The modules around that line are captured as they are called in one
recorded step: on fake tensors, or a real step if data decide what runs. A module that is called otherwise than planned
runs unplanned with a warning, and the next step is planned again. Inputs a little smaller than those of a plan run by
that plan, in graphs with symbols for sizes, if no module holds more than planned.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import le
from typing import Any
from weakref import ref

import torch
from torch import nn

from planner.capture.blocks.regions import AS_BLOCK, Block, SeenCall
from planner.capture.blocks.regions import Step as FollowedStep
from planner.capture.failures import explain_failures, explain_forward, failing_as, in_one_line, raised_at
from planner.capture.inputs import Inputs, check_plannable, varying_dimensions
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import NOT_CAPTURED, Backend, CallOfAnySize
from planner.capture.model_facts import is_fake
from planner.capture.operands import is_opaque
from planner.capture.planned_call import forwards
from planner.capture.programs import Program
from planner.capture.state_restore import RandomStates, random_states_kept, seed_all
from planner.capture.symbolic import OtherProgramError, at_sizes
from planner.capture.torch_internals import boxed
from planner.common.units import format_percent
from planner.errors import (
    CaptureError,
    ForwardError,
    InfeasibleBudgetError,
    PlanMismatchError,
    PlannerError,
    RuntimeUnsupportedError,
)
from planner.findings.finding import Finding, Severity
from planner.ir.graph import Phase, TrainingGraph
from planner.ir.layers import is_within
from planner.plans.plan import Plan
from planner.runtimes._calls import CallsInSituations, Decided, RuntimeOfCalls, describe, weakly
from planner.runtimes._gradients import watched
from planner.runtimes._routes import TRIES, CallProfile, warn_of_another
from planner.runtimes._sized import NEAR, InputSizes, elements, sizes_of
from planner.runtimes._units import PlannedUnit, PlannedUnits, installed, lower_around, lowering
from planner.session.eager_study import recorded_for_real
from planner.session.step import Options, elsewhere_for, study_lowered

CAPTURED_SHARE = "captured-share"
"""Rule of a note: the share of saved bytes that captured modules make."""


@dataclass(frozen=True)
class PartsPlan:
    """A plan and the calls that it is for."""

    plan: Plan
    course: CallProfile
    given: Mapping[str, Any]
    """For each captured module, by path, a description of its inputs; see :func:`planner.runtimes._calls.describe`."""
    sizes: InputSizes = ()
    """Sizes of the model's inputs."""


@dataclass(frozen=True)
class SeenStep:
    """A step that was recorded, and the calls of modules in it, by their paths."""

    step: FollowedStep
    calls: Mapping[str, Sequence[SeenCall]]
    course: CallProfile
    begun: float


class PartsRuntime(CallsInSituations):
    """What ``model(...)`` runs while a plan is in force."""

    def __init__(self, model: nn.Module, options: Options, **settings: Any) -> None:
        super().__init__(model, options, **settings)
        self._eager: set[str] = set()
        """Modules that were called otherwise than planned, now left eager."""
        self._missed: RandomStates | None = None
        """Random states at the start of a step that ran more than planned."""
        self._misses = 0
        self._before: dict[Any, Decided] = {}
        """Plans of situations that are to be planned again, in case that fails."""
        self.keeps_old_plans = True
        """Whether a situation for which no plan fits any more keeps the one it had."""
        self._made: dict[Any, list[PartsPlan]] = {}
        """Plans by all that they depend on but sizes."""
        self._parts: dict[Any, _PlannedParts] = {}
        """By decisions."""
        self._calls: dict[nn.Module, _CallsUnderPlans] = {}
        self._captured = 0
        """How many calls had graphs of their own captured."""

    def plan_anew(self, options: Options) -> bool:
        """Plan under other options from the next call on; equal decisions run by the code that there is."""
        self.options, self.plan, self._decided, self._made = options, None, {}, {}
        return True

    def decide(self, inputs: Inputs) -> Decided:
        """Plan the modules that can be captured for these inputs, unless a plan for slightly larger ones serves."""
        situation = self.situation(inputs)
        kind, sizes = _without_sizes(situation)
        step = record(self.model, inputs, self.options, self._missed)
        made = None if self._missed else self._of_larger(self._made.get(kind, ()), sizes, step)
        if made is None or not all(part.call.may_vary for part in self._planned(made).forwards.values()):
            if self._captured == self.options.runtime.maximum_shapes:
                raise RuntimeUnsupportedError(
                    f"the parts of {type(self.model).__name__} were captured {self._captured} times, and this call "
                    "needs captures of its own: pad or bucket its inputs, or pass runtime=Runtime(maximum_shapes=...)"
                )
            self._captured += 1
        try:
            if made is None:
                self.complete_options(inputs)
                made = plan_parts(self.model, inputs, self.options, step, self._eager, **self.known)
                self._made.setdefault(kind, []).append(replace(made, sizes=sizes))
        except (InfeasibleBudgetError, CaptureError) as error:
            if situation not in self._before or not self.keeps_old_plans:
                raise
            warnings.warn(f"some steps of {type(self.model).__name__} break the budget: {error}", stacklevel=7)
            self.put_in_force(self._before[situation][0])  # none is after options have changed
            return self._before[situation]
        self.is_confirmed, self._missed = True, None
        self.put_in_force(made.plan)
        return made.plan, partial(self._watched, situation, self._planned(made), made)

    def _of_larger(self, known: Iterable[PartsPlan], sizes: InputSizes, step: SeenStep) -> PartsPlan | None:
        """Return the plan of the nearest slightly larger inputs, if this step has no more of anything."""
        for made in sorted(known, key=lambda made: elements(made.sizes)):
            if elements(sizes) < NEAR * elements(made.sizes):
                return None
            given = {path: describe(step.calls[path][0].inputs) for path in made.given if path in step.calls}
            pairs = ((given.get(path, ()), theirs) for path, theirs in made.given.items())
            if not step.course.beyond(made.course) and all(_is_no_more(ours, theirs) for ours, theirs in pairs):
                return replace(made, course=step.course, given=given)
        return None

    def _planned(self, made: PartsPlan) -> _PlannedParts:
        """Return what runs a plan's modules, and keeps its bytes."""
        plan = made.plan
        decisions = plan.fingerprint["blocks"], frozenset(plan.recomputations.items()), plan.offloading
        if decisions not in self._parts:
            self._parts[decisions] = _PlannedParts(self.model, made, self._calls)
        return self._parts[decisions]

    @contextmanager
    def _watched(self, situation: Any, parts: _PlannedParts, made: PartsPlan) -> Iterator[None]:
        """Run planned parts in one call, and check afterwards whether the call was as planned."""
        begun = RandomStates()
        parts.begin(made)
        with installed(self.model, parts.forwards), forwards(parts.counted):
            yield
        unlike = {path: why for path, why in parts.unlike.items() if path not in self._eager}
        more = parts.now.beyond(made.course)
        if not unlike and (not more or self._misses == TRIES):
            return
        self._eager.update(unlike)
        self._misses += bool(more)
        self._missed = begun if more else None
        warn_of_another(self.model, [*(f"{path} {why}" for path, why in unlike.items()), *more])
        self._before[situation] = self._decided.pop(situation)
        self._made.clear()


class _PlannedParts(PlannedUnits):
    """The captured modules of a model, and counters of all others' calls."""

    def __init__(self, model: nn.Module, made: PartsPlan, calls: dict[nn.Module, _CallsUnderPlans]) -> None:
        self.model, self.calls = model, calls
        super().__init__(model, made.plan, _PlannedPart)
        self.counted = {
            module: partial(self._count, path, module, module.forward)
            for path, module in model.named_modules()
            if path and not any(is_within(path, part) for part in made.given)
        }

    def begin(self, made: PartsPlan) -> None:
        """Begin a step."""
        self.plan, self.given, self.held_bytes = made.plan, made.given, {}
        self.now = CallProfile(self.model)
        self.ran: set[str] = set()
        self.unlike: dict[str, str] = {}
        """For each module called otherwise than planned, by path, the difference."""

    def _count(self, path: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.now.note(path, module, (args, kwargs))
        return forward(*args, **kwargs)


class _CallsUnderPlans(CallOfAnySize):
    """A module's calls, captured once for all plans."""

    def __init__(self, module: nn.Module) -> None:
        partition = lambda joint: self.part.partition(joint)  # noqa: E731
        backend = Backend(partition, finish=watched, make_program=self._program, **AS_BLOCK)
        super().__init__(module, module.forward, backend)
        self.sizes: list[InputSizes] = []
        """Sizes that were captured."""
        self.part: Any = None
        """The module under the plan in force."""

    def _program(self, joint: JointGraph, given: Sequence[Any]) -> Program:
        part = self.part
        key = joint.graph, *(x.shape if isinstance(x, torch.Tensor) else x for x in given)
        if key not in part.programs:
            part.names_may_differ = joint.varies
            try:
                halves = part.partition(at_sizes(joint, given) if joint.varies else joint)
            except PlanMismatchError as error:
                if not joint.varies:
                    raise
                self.may_vary = False
                raise OtherProgramError(str(error)) from error
            forward, backward = map(boxed, halves)
            part.programs[key] = Program(forward, backward, weakly(self._is_in_force, ref(part)), halves=halves)
        return part.programs[key]

    def _is_in_force(self, part: Callable[[], Any]) -> bool:
        return self.part is part()


class _PlannedPart(PlannedUnit):
    """A captured module under one plan: planned if called as planned, else eager."""

    def __init__(self, planned: _PlannedParts, path: str, block: nn.Module, equal: list[PlannedUnit]) -> None:
        self._parts, self._forward = planned, block.forward
        self.programs: dict[Any, Program] = {}
        """By what was captured, and what that is given."""
        super().__init__(planned, path, block, equal)

    def captured_by(self, block: nn.Module) -> Any:
        """Return what captures the module's calls, under any plan."""
        calls = self._parts.calls
        if block not in calls:
            calls[block] = _CallsUnderPlans(block)
        return calls[block]

    def known(self, args: tuple[Any, ...], kwargs: dict[str, Any], of: PlannedUnit) -> Any:
        """Run what was captured for a call of an equal module, or return ``NOT_CAPTURED``."""
        self.call.part = self
        return super().known(args, kwargs, of)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        unlike = self._parts.unlike
        if self.path in self._parts.ran:
            unlike[self.path] = "is called more than once"
            return self._forward(*args, **kwargs)
        self._parts.ran.add(self.path)
        ours, planned_for = describe(Inputs(args, kwargs)), self._parts.given[self.path]
        if ours != planned_for and not (self.call.may_vary and _is_no_more(ours, planned_for)):
            unlike[self.path] = "is called with other sizes, types or numbers"
        else:
            try:
                with explain_failures(self._block):
                    return super().__call__(*args, **kwargs)
            except ForwardError:
                raise
            except (CaptureError, PlanMismatchError) as error:  # raised before anything has run
                unlike[self.path] = f"is captured differently ({error})"
        return self._forward(*args, **kwargs)

    def captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module by its own code, captured first where there is none; sizes that vary become symbols."""
        result = self.known(args, kwargs, self)
        if result is NOT_CAPTURED:
            inputs, call = Inputs(args, kwargs), self.call
            result = call.captured(inputs, varying_dimensions(inputs, call.sizes) if call.may_vary else [])
            call.sizes.append(sizes_of(inputs.tensors()))
        return result


def plan_parts(
    model: nn.Module, inputs: Inputs, options: Options, seen: SeenStep, without: Collection[str] = (), **known: Any
) -> PartsPlan:
    """Plan a step whose largest capturable modules are graphs, except those in ``without``.

    ``known`` is for :func:`planner.session.step.plan_study`. Raises CaptureError if nothing can be captured.
    """
    followed, calls = seen.step, seen.calls
    options.search.tell("capturing the largest modules that can be captured")
    allowed = {path: each for path, each in calls.items() if not any(is_within(path, other) for other in without)}
    said = f"a step of {type(model).__name__} cannot be followed"
    with failing_as(lambda error: CaptureError(f"{said}: {in_one_line(error)}{raised_at(error)}")):
        found, left = followed.capture_parts(allowed, lowering(model, options))
        blocks = {path: block for path, block in found.items() if _has_choice(block)}
        if not blocks:
            why = f": {next(iter(left))}: {next(iter(left.values()))}" if left else ""
            kind = type(model).__name__
            raise CaptureError(f"no module of {kind} that can be captured leaves anything to choose{why}")
        step = lower_around(followed, blocks, inputs, options)
    lowered, blocks = step.lowered, step.units
    if followed.checkpoints:
        raise CaptureError(f"{type(model).__name__} calls torch.utils.checkpoint itself outside of captured modules")
    opaque = [node for node in lowered.lowered.operation_nodes if node is not None and is_opaque(node.target)]
    if opaque:
        raise CaptureError(f"how much {opaque[0].target} saves is known only when it runs")
    notes = tuple(_notes(followed, blocks, left, lowered.lowered.graph))
    lowered = replace(lowered, warnings=notes, capture_seconds=time.perf_counter() - seen.begun)
    study = replace(study_lowered(model, lowered, options), varies=followed.is_real)
    plan = replace(step, lowered=lowered).plan(model, options, study=study, **known)
    return PartsPlan(plan, seen.course, {path: describe(calls[path][0].inputs) for path in blocks})


def record(model: nn.Module, inputs: Inputs, options: Options, missed: RandomStates | None = None) -> SeenStep:
    """Record a forward, without data if possible; if it draws random numbers, the largest of several.

    One of these starts from the states ``missed``.
    """
    begun, elsewhere = time.perf_counter(), elsewhere_for(model, options)
    check_plannable(model, inputs)
    with explain_forward(model):
        step = FollowedStep(model, inputs, elsewhere)
        try:
            seen = step.calls()
        except PlannerError:
            raise
        except Exception:
            if is_fake(model) or elsewhere is not None:
                raise
            step = FollowedStep(model, inputs, real=True)
            seen = step.calls()
        tried = [(step.begins_with, seen)]
        for states in [*([missed] if missed else []), *_other_states()] if step.draws else []:
            step.begins_with = states
            with suppress(Exception):
                tried.append((states, step.calls()))
        step.begins_with, seen = max(tried, key=lambda one: _course(model, one[1]).size)
    return SeenStep(step, seen, _course(model, seen), begun)


def _other_states() -> list[RandomStates]:
    found = []
    with random_states_kept():
        for number in range(TRIES - 1):
            seed_all(number)
            found.append(RandomStates())
    return found


def _course(model: nn.Module, seen: Mapping[str, Sequence[SeenCall]]) -> CallProfile:
    course = CallProfile(model)
    for path, calls in seen.items():
        for call in calls:
            course.note(path, call.module, (call.inputs.args, call.inputs.kwargs))
    return course


def _is_no_more(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether a module is given as much as planned, or smaller tensors."""

    def is_smaller(a: Any, b: Any) -> bool:
        is_alike = isinstance(a, tuple) and isinstance(b, tuple) and (len(a[0]), *a[1:]) == (len(b[0]), *b[1:])
        return is_alike and all(map(le, a[0], b[0]))

    return len(ours) == len(theirs) and all(a == b or is_smaller(a, b) for a, b in zip(ours, theirs, strict=True))


def _without_sizes(situation: Any) -> tuple[Any, InputSizes]:
    """Split a situation into all but the sizes of inputs, and those."""
    (described, *others), *state = situation
    sizes = tuple(tuple(one[0]) for one in described if isinstance(one, tuple))
    return (tuple(one[1:] if isinstance(one, tuple) else one for one in described), *others, *state), sizes


def _has_choice(block: Block) -> bool:
    """Whether a captured module saves anything that could be recomputed."""
    graph = block.lowered.graph
    returned = {v for node in block.outputs for v in block.lowered.storage_of[node]}
    made = {v for o in graph.operations if o.phase is Phase.FORWARD and o.recomputable for v in o.outputs}
    read = {v for o in graph.operations if o.phase is Phase.BACKWARD for v in o.inputs}
    return bool(made & read - returned)


def _notes(
    step: FollowedStep, blocks: Mapping[str, Block], left: Mapping[str, str], graph: TrainingGraph
) -> Iterator[Finding]:
    path, why = next(iter(left.items()), ("", ""))
    yield Finding(
        rule=CAPTURED_SHARE,
        severity=Severity.NOTE,
        evidence=f"{len(blocks)} modules are captured, and make {format_percent(captured_share(graph))} of the bytes "
        "that the step saves",
        cause=f"{path} is not captured: {why}" if left else "the rest of the model's step is not captured",
        fix="remove what stops the capture, and more of the step is planned",
    )
    if step.is_real:
        yield recorded_for_real(depends_on_data=True)


def captured_share(graph: TrainingGraph) -> float:
    """Return the share of saved bytes that captured modules make."""
    read = {v for o in graph.operations if o.phase is Phase.BACKWARD for v in o.inputs}
    saved = [(o, v) for o in graph.operations if o.phase is Phase.FORWARD for v in o.outputs if v in read]
    total_bytes = sum(graph.values[v].size_bytes for _, v in saved)
    inside_bytes = sum(graph.values[v].size_bytes for o, v in saved if o.region)
    return inside_bytes / total_bytes if total_bytes else 0.0


class _Parts(RuntimeOfCalls):
    calls = PartsRuntime
    name = "parts"
    summary = "the largest modules that can be captured as planned graphs of their own, the rest eager"

    def plan(self, model: nn.Module, inputs: Inputs, options: Options, **known: Any) -> Plan:
        return plan_parts(model, inputs, options, record(model, inputs, options), **known).plan


RUNTIME = _Parts()
