"""Runtime ``auto``: tries pairs of granularity and code generator in order, and keeps the reason of each refusal."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from planner import runtimes
from planner.analysis.eager_baseline import LARGER, SLOWER
from planner.capture import model_facts as facts
from planner.capture.inputs import Inputs
from planner.capture.torch_internals import entered, is_watched
from planner.common.options import Offload
from planner.common.units import format_seconds
from planner.errors import CaptureError, ForwardError, NoBackwardError, PlannerError, RuntimeUnsupportedError
from planner.findings.finding import Finding, Severity
from planner.plans.plan import NoPlanFitsError, Plan
from planner.runtimes import Prepare, ReplannedModel
from planner.runtimes._calls import RuntimeOfCalls, as_they_are, situation_of
from planner.session.step import Options

_RULE = "runtime"
_ANY_SOLVER = "auto"
_CHOOSES = {"parts": "inside of captured modules only", "modules": "among modules only"}


def candidates(model: nn.Module) -> list[str]:
    """Return the runtimes to try, in order.

    With several ranks there is one candidate: gradients must be sent during the backward, and all ranks must do the
    same, so a failure on one rank is an error. It is ``modules`` if ranks share layers (``parallelize_module``) or
    parts of a block are sharded by themselves, ``inductor_blocks`` if blocks have their own ``compile()``, as in
    torchtitan, and else ``regional``.
    """
    if not (facts.has_several_ranks() or facts.is_sharded(model)):
        return ["graph", "parts", "modules"]
    if facts.shares_layers(model) or facts.sharded_inside(model):
        return ["modules"]
    return ["inductor_blocks" if facts.compiled_parts(model) else "regional"]


def choose(model: nn.Module) -> str:
    """Return the runtime that is tried first."""
    return candidates(model)[0]


@dataclass(frozen=True)
class Refusal:
    """Why a runtime does not run a model, or a call of it."""

    runtime: str
    error: PlannerError

    @property
    def does_not_fit(self) -> bool:
        """Whether no plan keeps the budget."""
        return isinstance(self.error, NoPlanFitsError)

    @property
    def is_of_capture(self) -> bool:
        """Whether this runtime cannot capture or run the model."""
        return isinstance(self.error, (CaptureError, RuntimeUnsupportedError))


Tried = list[Plan | Refusal]
"""Outcomes of the candidates so far, in order."""


def try_each(names: Sequence[str], tried: Tried, options: Options, plan_with: Callable[[str], Plan]) -> Plan | None:
    """Plan with those runtimes that may improve on what was tried, and return the cheapest plan, if any."""
    for name in names:
        if may_improve(name, tried, options):
            try:
                tried.append(plan_with(name))
            except PlannerError as error:
                tried.append(Refusal(name, error))
    return cheapest(tried)


def may_improve(name: str, tried: Tried, options: Options) -> bool:
    """Whether to try a candidate after others.

    If the whole model was captured, only the eager step can be cheaper: a captured one may be slower, or hold more. But
    it does not offload.
    """
    if not tried:
        return True
    if name == "modules" and options.offload.enabled is True:
        return False
    first = tried[0]
    if isinstance(first, Refusal) and not first.does_not_fit:
        return first.is_of_capture
    is_dearer = isinstance(first, Refusal) or any(w.rule in (SLOWER, LARGER) for w in first.warnings)
    return is_dearer and name == "modules" and options.search.solver == _ANY_SOLVER


def cheapest(tried: Tried) -> Plan | None:
    """Return the cheapest plan, or None; ``modules`` wins a tie with ``parts``."""
    plans = [one for one in tried if isinstance(one, Plan)]
    if isinstance(tried[0], Plan):
        return min(plans, key=lambda plan: plan.step_seconds)
    return min(reversed(plans), key=lambda plan: plan.added_seconds, default=None)


def reason(tried: Tried) -> PlannerError:
    """Return the error to raise if no candidate has a plan.

    If the first candidate failed to capture and others do not fit, it is the error with the lowest feasible peak; else
    the first candidate's.
    """
    refusals = [one for one in tried if isinstance(one, Refusal)]
    lowest = {r.error.minimum_feasible_peak_bytes: r.error for r in refusals if isinstance(r.error, NoPlanFitsError)}
    return refusals[0].error if refusals[0].does_not_fit or not lowest else lowest[min(lowest)]


def explained(plan: Plan, tried: Tried, options: Options) -> Plan:
    """Add findings to a plan that say which candidates were refused and why; warn if the capture failed."""
    first = tried[0]
    if plan is first:
        return plan
    if isinstance(first, Plan):
        return _with(plan, [_cheaper_eager(plan, f"takes {format_seconds(first.step_seconds)}")])
    if first.does_not_fit:
        return _with(plan, [_cheaper_eager(plan, "does not fit")])
    return _with(plan, [_said(first, options, plan.runtime), *_further(tried[1:])])


def _further(tried: Sequence[Plan | Refusal]) -> Iterator[Finding]:
    """Say why candidates after the first were refused."""
    for one in tried:
        if isinstance(one, Refusal):
            yield Finding(
                rule=_RULE,
                severity=Severity.NOTE,
                evidence=str(one.error),
                cause=f"the runtime {one.runtime!r} was tried before this one, and refused",
                fix="nothing",
            )


def _said(first: Refusal, options: Options, taken: str) -> Finding:
    """Warn that another runtime was taken, and return the finding that says so."""
    instead = f"{taken!r} instead of {first.runtime!r}"
    solver = options.search.solver if taken == "modules" else _ANY_SOLVER
    ignored = f"; the solver {solver!r} is for whole graphs, and is not used" if solver != _ANY_SOLVER else ""
    warnings.warn(f"runtime {instead}: {first.error}{ignored}", stacklevel=5)
    return Finding(
        rule=_RULE,
        evidence=str(first.error),
        cause=f"planned for the runtime {instead}; it can choose {_CHOOSES[taken]}{ignored}",
        fix="remove what stops the capture for a finer plan",
    )


def _cheaper_eager(plan: Plan, captured: str) -> Finding:
    """Say why the plan is for the eager step."""
    return Finding(
        rule=_RULE,
        severity=Severity.NOTE,
        evidence=f"as captured the planned step {captured}, and in eager it takes {format_seconds(plan.step_seconds)}",
        cause=f"this model's step costs more captured than eager, so it is planned for the runtime {plan.runtime!r}",
        fix="nothing; runtime='graph' plans the captured step",
    )


def _with(plan: Plan, notes: Sequence[Finding]) -> Plan:
    new = [note for note in notes if note not in plan.warnings]
    return replace(plan, warnings=(*plan.warnings, *new)) if new else plan


def _for(name: str, options: Options) -> Options:
    """Return the options for a runtime; ``modules`` always uses its own solver."""
    solver = _ANY_SOLVER if name == "modules" else options.search.solver
    return replace(options, runtime=replace(options.runtime, name=name), search=replace(options.search, solver=solver))


class AutoRuntime:
    """What ``model(...)`` runs: the first candidate, or another if it refuses the model or has no plan."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        plan: Plan | None = None,
        replan: bool = True,
        prepare: Prepare | None = None,
    ) -> None:
        self._model, self._options, self._replan = model, options, replan
        self._prepare = prepare or as_they_are
        self._notes = [w for w in plan.warnings if w.rule == _RULE] if plan is not None else []
        self._running = self._start(plan.runtime if plan is not None else choose(model), plan)
        self._may_change = plan is None or replan
        self._is_compared = plan is not None
        """Whether eager's step, if it was recorded, was compared with the captured one."""
        self._noted: dict[int, tuple[Plan, Plan]] = {}
        """By its identity, a plan as it was made, and with the notes."""
        self._refused: set[Any] = set()
        """Situations in the middle of training that the running runtime could not capture."""
        self._instead: ReplannedModel | None = None
        """The runtime for those situations."""
        self._current = self._running

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        made = self._current.plan
        if made is None or not self._notes:
            return made
        if id(made) not in self._noted:  # one object for one plan: who observes the loop measures until the plan stays
            self._noted[id(made)] = made, _with(made, self._notes)
        return self._noted[id(made)][1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, planned if gradients are on."""
        running = self._running
        # A dispatch mode of the user's would count what planning runs.
        waits = running.is_searching or is_watched() or not torch.is_grad_enabled()
        if not self._is_compared and not waits and running.plan is not None:
            self._compare(running.plan, Inputs(args, kwargs))
        if not self._may_change:
            return self._running(*args, **kwargs)
        self._current = self._running
        if self._instead is not None and self._kind_of(args, kwargs) in self._refused:
            self._current = self._instead
            return self._instead(*args, **kwargs)
        try:
            return self._running(*args, **kwargs)
        except (CaptureError, RuntimeUnsupportedError, NoPlanFitsError) as error:
            first, *others = candidates(self._model)
            refusal = Refusal(first, error)
            if not others or (refusal.does_not_fit and self._options.search.solver != _ANY_SOLVER):
                raise
        if self._running.plan is not None:
            return self._run_instead(refusal, args, kwargs)
        return self._run_other(refusal, others, args, kwargs)

    @property
    def is_searching(self) -> bool:
        """Whether a background search for a better plan is running."""
        return self._running.is_searching

    def plan_anew(self, options: Options) -> bool:
        """Plan the next call under other options where the candidate that runs can."""
        self._options = options
        if not self._may_change or self._instead is not None:
            return False
        self._is_compared, plan = False, self._running.plan
        return self._running.plan_anew(_for(plan.runtime if plan else choose(self._model), options))

    def stop(self) -> None:
        """Undo what was done to the model's parts."""
        self._running.stop()
        if self._instead is not None:
            self._instead.stop()

    def plan_for(self, inputs: Inputs) -> Plan:
        """Plan a call ahead of it; see :class:`planner.runtimes.ReplannedModel`."""
        if self._running.plan is not None:
            self._running.plan_for(inputs)
        else:
            try:
                planned: Plan | Refusal = self._running.plan_for(inputs)
            except PlannerError as error:
                planned = Refusal(candidates(self._model)[0], error)
            if not self._running.is_searching:  # else a call compares, once the better plan is known
                self._compare(planned, inputs)
        assert self.plan is not None
        return self.plan

    def _compare(self, captured: Plan | Refusal, inputs: Inputs) -> None:
        """Take another candidate if the first one refuses, or eager's step if the captured one is dearer."""
        self._is_compared = True
        tried: Tried = [captured]
        with entered(facts.of_model(self._model, inputs.args, inputs.kwargs)):
            others = candidates(self._model)[1:]  # several ranks have none: each would choose for itself
            plan = try_each(others, tried, self._options, partial(self._planned, inputs))
        if plan is None:
            raise reason(tried)
        if plan is not captured:
            self._running.stop()
            self._running = self._current = self._start(plan.runtime, plan)
            self._notes = [*explained(plan, tried, self._options).warnings]
            self._may_change = plan.runtime == "parts"

    def _planned(self, inputs: Inputs, name: str) -> Plan:
        options = self._prepare(self._options, inputs)  # not before it is needed: an eager step is recorded
        return runtimes.get(name).plan(self._model, inputs, _for(name, options))

    def _run_other(self, refusal: Refusal, others: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Switch to another candidate, if one can run the model."""
        tried: Tried = [refusal]
        other = self._started(refusal, tried, others, Inputs(args, kwargs))
        try:
            result = other(*args, **kwargs)
        except BaseException:
            other.stop()
            raise
        self._running = self._current = other
        self._may_change = other.plan is not None and other.plan.runtime == "parts"
        if other.plan is not None:
            noted = explained(replace(other.plan, warnings=()), tried, self._options)
            self._notes = list(noted.warnings)
        elif not refusal.does_not_fit:
            _said(refusal, self._options, "modules")
        return result

    def _started(self, refusal: Refusal, tried: Tried, others: Sequence[str], inputs: Inputs) -> ReplannedModel:
        """Plan with the other candidates and start the cheapest."""
        parts: Any = self._start("parts", None)

        def plan_with(name: str) -> Plan:
            return parts.plan_for(inputs) if name == "parts" else self._planned(inputs, name)

        with entered(facts.of_model(self._model, inputs.args, inputs.kwargs)):
            plan = try_each(others, tried, self._options, plan_with)
        if plan is not None and plan.runtime == "parts":
            return parts
        parts.stop()
        if plan is None:
            self._refuse(refusal, tried)
        return self._start("modules", plan)

    def _refuse(self, refusal: Refusal, tried: Tried) -> None:
        """Raise why there is no plan, unless ``modules`` runs the call as it is, or raises its own error."""
        last = tried[-1]
        if isinstance(last, Plan) or isinstance(last.error, (ForwardError, NoBackwardError)):
            return
        if not last.does_not_fit and not last.is_of_capture:
            raise last.error from refusal.error  # which may be all that stands in the way
        failed = reason(tried)
        if failed is not refusal.error:
            _said(refusal, self._options, "modules")
        raise failed from None

    def _run_instead(self, refusal: Refusal, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that cannot be captured in the middle of training under ``modules``, within the budget."""
        first_time = self._instead is None
        if self._instead is None:
            assert self._running.plan is not None
            without_offload = replace(self._options.after(self._running.plan), offload=Offload(False))
            self._instead = self._start("modules", None, without_offload)
        try:
            result = self._instead(*args, **kwargs)
        except (CaptureError, RuntimeUnsupportedError, NoPlanFitsError) as error:
            if not getattr(self._running, "keeps_old_plans", True):
                self._running.keeps_old_plans = True  # type: ignore[attr-defined]
                return self._running(*args, **kwargs)
            if refusal.does_not_fit or not isinstance(error, NoPlanFitsError):
                raise refusal.error from None  # it is the call that fails, not its capture
            raise error from refusal.error  # the budget is what stands in the way
        if first_time:
            why = str(refusal.error).rstrip(".")
            warnings.warn(f"{why}. Such calls run under the runtime 'modules', within the budget", stacklevel=3)
        self._refused.add(self._kind_of(args, kwargs))
        self._current = self._instead
        return result

    def _kind_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a key that ignores the values of numbers: each of them would cost a capture."""
        return situation_of(self._model, Inputs(args, kwargs)), len(args), tuple(kwargs)

    def _start(self, name: str, plan: Plan | None, options: Options | None = None) -> ReplannedModel:
        options = _for(name, options or self._options)
        running = runtimes.get(name).start(self._model, options, plan=plan, replan=self._replan, prepare=self._prepare)
        if name == "parts":  # where none of its plans has room for a step that runs more, modules may
            running.keeps_old_plans = self._options.search.solver != _ANY_SOLVER  # type: ignore[attr-defined]
        return running


class _Auto(RuntimeOfCalls):
    calls = AutoRuntime
    name = "auto"
    summary = "graph; parts or modules where the model cannot be captured; regional with several ranks"
    runs_sharded = True

    def plan(self, model: nn.Module, inputs: Inputs, options: Options, **known: Any) -> Plan:
        def plan_with(name: str) -> Plan:
            return runtimes.get(name).plan(model, inputs, _for(name, options), **known)

        if (reuse := known.get("reuse")) is not None:
            return plan_with(reuse.runtime)
        tried: Tried = []
        plan = try_each(candidates(model), tried, options, plan_with)
        if plan is None:
            raise reason(tried)
        return explained(plan, tried, options)


RUNTIME = _Auto()
