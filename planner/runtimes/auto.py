"""Picks a runtime, and says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from planner import runtimes
from planner.analysis.eager_baseline import LARGER, SLOWER
from planner.analysis.study import Study
from planner.capture.device import entered, of_model
from planner.capture.inputs import Inputs
from planner.capture.parallel import has_several_ranks, is_sharded, sharded_inside, shares_layers
from planner.capture.planned_call import compiled_parts
from planner.common.units import format_seconds
from planner.errors import CaptureError, PlannerError, RuntimeUnsupportedError
from planner.findings.finding import Finding, Severity
from planner.plans.plan import NoPlanFitsError, Plan
from planner.runtimes import Prepare, Running
from planner.runtimes._arena import ArenaInUse
from planner.runtimes._calls import StartsCalls, situation_of
from planner.session.step import Options

FIRST, PARTS, INSTEAD = "graph", "parts", "modules"
_RULE = "runtime"
_ANY_SOLVER = "auto"

_DEARER = {SLOWER, LARGER}
"""What is said of a captured step that costs more than eager."""

_CHOOSES = {PARTS: "inside of captured modules only", INSTEAD: "among modules only"}

_DOES_NOT_FIT = "does not fit"

_Refusal = CaptureError | RuntimeUnsupportedError | NoPlanFitsError
_REFUSALS = (CaptureError, RuntimeUnsupportedError, NoPlanFitsError)


def choose(model: nn.Module) -> str:
    """Return the runtime to try first; which one suits how the process trains is decided here, and only here.

    With several ranks gradients must go out while the backward runs, and every rank must do the same:
    what one rank cannot carry out is then an error, and nothing else is tried. Ranks that share every layer
    (``parallelize_module``) run the model as it is, and so do those that gather parts of a block by themselves. Where
    blocks were compiled by their own ``compile()``, as torchtitan does, planned ones are compiled too.
    """
    if not (has_several_ranks() or is_sharded(model)):
        return FIRST
    if shares_layers(model) or sharded_inside(model):
        return INSTEAD
    return "inductor_blocks" if compiled_parts(model) else "regional"


class AutoRuntime:
    """What ``model(...)`` runs: the first choice, or the other one if that cannot capture the model or has no plan."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        plan: Plan | None = None,
        replan: bool = True,
        prepare: Prepare | None = None,
    ) -> None:
        self._model, self._options, self._replan, self._prepare = model, options, replan, prepare
        self._note = next((w for w in plan.warnings if w.rule == _RULE), None) if plan is not None else None
        self._running = self._start(plan.runtime if plan is not None else choose(model), plan)
        self._may_change = plan is None or replan
        self._refused: set[Any] = set()
        """Situations in the middle of training that the first choice could not capture."""
        self._instead: Running | None = None
        self._current = self._running

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        made = self._current.plan
        return made if made is None or self._note is None else _with(made, self._note)

    @property
    def plans(self) -> Mapping[str, Plan]:
        """The plans of all input sizes that ran."""
        return {**getattr(self._instead, "plans", {}), **getattr(self._running, "plans", {})}

    @property
    def arena(self) -> ArenaInUse | None:
        """What holds the steps at fixed places."""
        return getattr(self._current, "arena", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, planned if gradients are on."""
        if not self._may_change:
            return self._running(*args, **kwargs)
        self._current = self._running
        if self._instead is not None and self._kind_of(args, kwargs) in self._refused:
            self._current = self._instead
            return self._instead(*args, **kwargs)
        try:
            return self._running(*args, **kwargs)
        except _REFUSALS as refusal:
            does_not_fit = isinstance(refusal, NoPlanFitsError)
            if choose(self._model) != FIRST or (does_not_fit and self._options.search.solver != _ANY_SOLVER):
                raise
            if self._running.plan is not None:
                return self._run_instead(refusal, args, kwargs)
            return self._run_other(refusal, args, kwargs)

    def _run_other(self, refusal: _Refusal, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model itself from now on, if that can: a call that fails there too says nothing of the model."""
        does_not_fit = isinstance(refusal, NoPlanFitsError)
        instead = self._start(INSTEAD, None) if does_not_fit else self._cheaper(args, kwargs)
        try:
            result = instead(*args, **kwargs)
        except BaseException as error:
            instead.stop()
            if isinstance(error, NoPlanFitsError) and not does_not_fit:
                _said(refusal, self._options)
            elif isinstance(error, (NoPlanFitsError, CaptureError, RuntimeUnsupportedError)):
                raise refusal from None
            raise
        self._running = self._current = instead
        self._may_change = instead.plan is not None and instead.plan.runtime == PARTS
        if does_not_fit:
            assert instead.plan is not None
            self._note = _takes_eager(instead.plan, _DOES_NOT_FIT)
        else:
            self._note = _said(refusal, self._options, instead.plan.runtime if instead.plan else INSTEAD)
        return result

    def _cheaper(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Running:
        """Return what is to run a model that cannot be captured; where no plan fits, ``modules`` is to say so."""
        inputs = Inputs(args, kwargs)
        options = self._prepare(inputs) if self._prepare is not None else self._options

        parts: Any = self._start(PARTS, None)

        def made_by(name: str) -> Plan:
            if name == PARTS:
                made: Plan = parts.plan_for(inputs)
                return made
            return runtimes.get(name).plan(self._model, inputs, _for(name, options))

        plan = None
        with entered(of_model(self._model, args, kwargs)), suppress(*_REFUSALS):
            plan = _in_parts_or_modules(made_by)
        if plan is not None and plan.runtime == PARTS:
            running: Running = parts
            return running
        parts.stop()
        return self._start(INSTEAD, plan)

    def stop(self) -> None:
        """Undo what was done to the model's parts."""
        self._running.stop()
        if self._instead is not None:
            self._instead.stop()

    def _kind_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Say what calls that differ in numbers alone have in common: each number would cost a capture."""
        return situation_of(self._model, Inputs(args, kwargs)), len(args), tuple(kwargs)

    def _run_instead(self, refusal: _Refusal, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call in the middle of training that the first choice cannot capture, within the budget."""
        first_time = self._instead is None
        if self._instead is None:
            assert self._running.plan is not None
            self._instead = self._start(INSTEAD, None, self._options.after(self._running.plan))
        try:
            result = self._instead(*args, **kwargs)
        except NoPlanFitsError as error:
            if isinstance(refusal, NoPlanFitsError):
                raise refusal from None
            raise error from refusal  # the budget is what stands in the way
        except (CaptureError, RuntimeUnsupportedError):
            raise refusal from None  # it is the call that fails, not its capture
        if first_time:
            reason = str(refusal).rstrip(".")
            warnings.warn(f"{reason}. Such calls run under the runtime {INSTEAD!r}, within the budget", stacklevel=3)
        self._refused.add(self._kind_of(args, kwargs))
        self._current = self._instead
        return result

    def _start(self, name: str, plan: Plan | None, options: Options | None = None) -> Running:
        prepare, options = self._prepare, _for(name, options or self._options)
        completed = (lambda seen: _for(name, prepare(seen))) if prepare is not None else None
        return runtimes.get(name).start(self._model, options, plan=plan, replan=self._replan, prepare=completed)


class _Auto(StartsCalls):
    calls = AutoRuntime
    name = "auto"
    summary = "graph; parts or modules where the model cannot be captured; regional with several ranks"
    runs_sharded = True

    def plan(
        self, model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
    ) -> Plan:
        def made_by(name: str) -> Plan:
            chosen = runtimes.get(name)
            return chosen.plan(model, inputs, _for(name, options), reuse=reuse, must_match=must_match)

        if reuse is not None:
            return made_by(reuse.runtime)
        try:
            return _or_eager(made_by, options) if choose(model) == FIRST else made_by(choose(model))
        except (CaptureError, RuntimeUnsupportedError) as refusal:
            if choose(model) != FIRST:
                raise
            try:
                plan = _in_parts_or_modules(made_by)
            except (CaptureError, RuntimeUnsupportedError):
                raise refusal from None  # it is the model that fails, not its capture
            return _with(plan, _said(refusal, options, plan.runtime))


def _in_parts_or_modules(made_by: Callable[[str], Plan]) -> Plan:
    """Plan a model that cannot be captured whole, in the cheaper of two ways.

    If neither keeps the budget, what is raised is for the way that needs least. Where nothing can be captured, or both
    cost the same, whole modules run again.
    """
    try:
        in_parts: Plan | PlannerError = made_by(PARTS)
    except PlannerError as error:
        in_parts = error
    try:
        in_modules = made_by(INSTEAD)
    except NoPlanFitsError as refusal:
        if isinstance(in_parts, Plan):
            return in_parts
        if isinstance(in_parts, NoPlanFitsError):
            raise min(in_parts, refusal, key=lambda each: each.minimum_feasible_peak_bytes) from None
        raise
    if isinstance(in_parts, Plan) and in_parts.added_seconds < in_modules.added_seconds:
        return in_parts
    return in_modules


def _or_eager(made_by: Callable[[str], Plan], options: Options) -> Plan:
    """Plan the captured step, or the eager one where that costs less: capture may be slower, or hold more."""
    is_known = isinstance(options.eager, Study) and options.search.solver == _ANY_SOLVER
    try:
        plan = made_by(FIRST)
    except NoPlanFitsError as refusal:
        if not is_known:
            raise
        try:
            return _as_eager(made_by(INSTEAD), _DOES_NOT_FIT)
        except NoPlanFitsError:
            raise refusal from None
    if is_known and _DEARER.intersection(warning.rule for warning in plan.warnings):
        with suppress(NoPlanFitsError):
            instead = made_by(INSTEAD)
            if instead.step_seconds < plan.step_seconds:
                return _as_eager(instead, f"takes {format_seconds(plan.step_seconds)}")
    return plan


def _as_eager(plan: Plan, captured: str) -> Plan:
    return _with(plan, _takes_eager(plan, captured))


def _takes_eager(plan: Plan, captured: str) -> Finding:
    """Say why a plan is of the eager step."""
    return Finding(
        rule=_RULE,
        severity=Severity.NOTE,
        evidence=f"planned as captured the step {captured}, and as eager takes {format_seconds(plan.step_seconds)}",
        cause=f"capture makes this model's step dearer than eager, so it is planned for the runtime {INSTEAD!r}",
        fix=f"nothing; runtime={FIRST!r} plans the captured step",
    )


def _for(name: str, options: Options) -> Options:
    """Return the options for a runtime; a solver that is named is for the first choice, see :func:`_said`."""
    solver = _ANY_SOLVER if name == INSTEAD else options.search.solver
    return replace(options, runtime=name, search=replace(options.search, solver=solver))


def _said(reason: _Refusal, options: Options, taken: str = INSTEAD) -> Finding:
    """Say that another runtime was taken, with what follows from that, as a warning; and give it as a finding."""
    instead = f"{taken!r} in place of {FIRST!r}"
    solver = options.search.solver if taken == INSTEAD else _ANY_SOLVER
    ignored = f"; the solver {solver!r} is one of whole graphs, and is not asked" if solver != _ANY_SOLVER else ""
    warnings.warn(f"runtime {instead}: {reason}{ignored}", stacklevel=4)
    return Finding(
        rule=_RULE,
        evidence=str(reason),
        cause=f"planned for the runtime {instead}, which can choose {_CHOOSES[taken]}{ignored}",
        fix="remove what stops the capture, and plans are finer",
    )


def _with(plan: Plan, note: Finding) -> Plan:
    return plan if note in plan.warnings else replace(plan, warnings=(*plan.warnings, note))


RUNTIME = _Auto()
