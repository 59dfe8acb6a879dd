"""Observe the loop around a wrapped model, and plan again for its outputs, its optimizer and the gradients it keeps.

Nothing of that is known when the model is wrapped. So the first plan counts every output to the end of the backward,
the optimizer that exists, and no gradients of earlier backwards; later plans are for what the steps showed.
"""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cost_models.devices import DeviceSpec
from planner.capture.torch_internals import at_end_of_backward, is_transformed, storage_of
from planner.capture.trees import leaf_tensors
from planner.common.options import AUTO, DROPPED, HELD, KEPT, OPTIMIZERS
from planner.common.units import format_bytes
from planner.errors import InfeasibleBudgetError
from planner.ir.static_memory import FINDS
from planner.measure.optimizers import OptimizerMemory, kept_for, memory_of_existing
from planner.plans.plan import Plan
from planner.runtimes import PlannedModel
from planner.session.step import Options, outputs_of

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

Start = Callable[[Options, Plan | None], PlannedModel]
"""Starts the runtime under options, and a plan if there is one for them."""

_STEPS = 4
"""How many steps are observed."""

_ORDER = (DROPPED, HELD, KEPT)
"""What a loop may do with outputs, by what it needs."""


@dataclass(frozen=True)
class Observable:
    """What is observed of: a model's tensors, where they are, and whether one process trains all of them."""

    name: str
    tensors: Callable[[], Iterable[torch.Tensor]]
    spec: Callable[[], DeviceSpec]
    """Gives the device where the model is now: it may have moved since it was wrapped."""
    is_alone: bool
    """Ranks would have to observe the same, so with several nothing is."""

    def parameters(self) -> list[nn.Parameter]:
        """Return each parameter once."""
        return [*{id(p): p for p in self.tensors() if isinstance(p, nn.Parameter)}.values()]

    def optimizer(self) -> OptimizerMemory | None:
        """Return what the optimizers that exist need."""
        spec = self.spec()
        return memory_of_existing(self.parameters(), alignment_bytes=spec.alignment_bytes, device_kind=spec.kind)


def before_observing(options: Options, around: Observable) -> Options:
    """Return the options with what the first plan assumes: outputs are held, and the optimizer that exists is used.

    What the user says of either stays as it is.
    """
    if options.training.outputs == AUTO:
        options = with_outputs(options, HELD)
    if options.training.optimizer != "none" or options.reused_plan is not None or not around.is_alone:
        return options
    return replace(options, optimizer=around.optimizer())


def or_dropped(run: Callable[[Options], Result], options: Options, *, may_drop: bool) -> Result:
    """Run under options; if no plan with all outputs fits, run for a loop that drops them, which is the likely one."""
    try:
        return run(options)
    except InfeasibleBudgetError:
        if not may_drop or _drops(options):
            raise
    return run(with_outputs(options, DROPPED))


class ObservedCalls:
    """What ``model(...)`` runs: a runtime, and another one in its place once the loop is known.

    ``may_drop`` says that the user leaves outputs to this. A plan that was given is kept: of it is only said what it
    does not count.
    """

    def __init__(self, around: Observable, options: Options, start: Start, plan: Plan | None, may_drop: bool) -> None:
        self._around, self._options, self._start, self._may_drop = around, options, start, may_drop
        self._is_fixed = options.reused_plan is not None or not around.is_alone
        self._running = start(options, plan)
        self._asked: Options | None = None
        """Options for what was observed, to be in force from the next call on."""
        self._to_watch = _STEPS if self._may_drop or _drops(options) else 0
        self._last: list[weakref.ref[Any]] = []
        """The storages of the outputs of the last call that was watched."""
        self.seen: tuple[int, bool] | None = None
        """Their bytes, and whether they were there when its backward had ended."""
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those whose state was looked at."""
        self._is_first, self._has_changed = True, False
        # A budget for what a step adds is not for what is there before it.
        self._has_gradients_counted = options.training.gradient_accumulation or options.budget.size is None
        self._trained: tuple[Plan | None, list[weakref.ref[nn.Parameter]]] = None, []
        """Parameters under the last plan: collecting them takes as long as a dozen small operations."""
        _observed.add(self)

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._running.plan

    def stop(self) -> None:
        """Undo what was done to the model's parts."""
        _observed.discard(self)
        self._running.stop()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, planned if gradients are on."""
        if not torch.is_grad_enabled() or is_transformed():
            return self._running(*args, **kwargs)
        if self._is_first:
            self._is_first = False
            self._look_for_optimizer()
        if self.seen is not None and self._to_watch:
            self._conclude(self.seen[0], are_held=self.seen[1])
        if not self._has_gradients_counted and self.plan is not None:
            self._look_for_gradients(self.plan)
        if self._asked is not None:
            return self._watched(self._planned_anew(self._asked, args, kwargs))
        if self.plan is None:
            return self._watched(self._first_planned(args, kwargs))
        return self._watched(self._running(*args, **kwargs)) if self._to_watch else self._running(*args, **kwargs)

    def _look_for_optimizer(self) -> None:
        """Count an optimizer that was made after the model was wrapped, and before the first step."""
        if not self._is_fixed and self._options.optimizer is None:
            found = before_observing(self._options, self._around)
            self._asked = found if found.optimizer is not None else None

    def _first_planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first call, under a plan for a loop that drops outputs if no other fits."""

        def run(options: Options) -> Any:
            if options is not self._options:
                self._start_anew(options)
            return self._running(*args, **kwargs)

        return or_dropped(run, self._options, may_drop=self._may_drop)

    def _planned_anew(self, asked: Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call under a plan for what was observed; if there is none, under the plan before.

        That may not be where it takes outputs to be dropped that the loop holds: the InfeasibleBudgetError is raised.
        """
        running, options, was_planned = self._running, self._options, self.plan is not None
        self._start_anew(asked)
        if not was_planned:
            return self._first_planned(args, kwargs)
        try:
            return self._running(*args, **kwargs)
        except InfeasibleBudgetError as error:
            if _drops(options) and not _drops(asked):
                error.add_note("planner: the loop holds the model's outputs, which the plan before took to be dropped")
                raise
            self._running, self._options, self._is_fixed, self._to_watch = running, options, True, 0
            if asked.optimizer is not options.optimizer:
                uncounted = "what the optimizer keeps"
            elif asked.training.gradient_accumulation and not options.training.gradient_accumulation:
                uncounted = "the gradients of earlier backwards: free them before each step with zero_grad()"
            elif _drops(asked):
                return self._running(*args, **kwargs)
            else:
                uncounted = "the outputs of a call, which the loop keeps until the next one returns: delete them before"
            warnings.warn(f"{error}. The plan in force does not count {uncounted}, or raise the budget", stacklevel=6)
        return self._running(*args, **kwargs)

    def _start_anew(self, options: Options) -> None:
        """Start the runtime under other options."""
        same, plan = outputs_of(options) == outputs_of(self._options), self.plan
        budget = replace(options.budget, at_least_bytes=0)  # what other outputs are a percentage of is another step
        options = replace(options, budget=budget.after(plan.budget_bytes) if same and plan else budget, eager=None)
        self._options, self._asked = options, None
        self._running = self._start(options, None)

    # Outputs.

    def _watched(self, result: Any) -> Any:
        """Return what a call did, and look at the end of the backward which outputs the loop still holds.

        The caller has no name for the result: an error that was caught keeps the frames below it, and all their names.
        """
        tensors, own = leaf_tensors(result), {id(storage_of(tensor)) for tensor in self._around.tensors()}
        storages = {id(s): s for t in tensors if t.dim() and t.layout is torch.strided for s in [storage_of(t)]}
        references = [weakref.ref(storage) for key, storage in storages.items() if key not in own]
        size_bytes = sum(storage.nbytes() for key, storage in storages.items() if key not in own)
        starts = [tensor for tensor in tensors if tensor.requires_grad]
        reference = weakref.ref(self)

        def ended() -> None:
            observer = reference()
            if observer is not None:
                observer.seen = size_bytes, _are_there(references)

        if references and starts:
            self._last = references
            at_end_of_backward(starts, ended)
        return result

    def _conclude(self, size_bytes: int, *, are_held: bool) -> None:
        """Ask for another plan if the loop does otherwise with outputs than the one in force assumes."""
        self.seen, self._to_watch, plan = None, self._to_watch - 1, self.plan
        now, assumed = KEPT if _are_there(self._last) else HELD if are_held else DROPPED, outputs_of(self._options)
        if now == assumed or plan is None:
            return
        is_more = _ORDER.index(now) > _ORDER.index(assumed)
        exceeds = is_more and plan.peak_bytes + size_bytes > plan.budget_bytes
        gains = not is_more and plan.recomputations and size_bytes >= _WORTH * plan.budget_bytes
        if not exceeds and (self._has_changed or not gains):
            return  # another plan takes seconds, and this one keeps the budget
        if self._may_drop:
            _log.info("outputs (%s) are %s: the step is planned again", format_bytes(size_bytes), now)
            self._asked, self._has_changed = with_outputs(self._asked or self._options, now), True
        elif is_more:
            warnings.warn(
                f"{format_bytes(size_bytes)} of outputs are {now} by the loop, and the plan takes them to be "
                f"{assumed}: pass training=Training(outputs={now!r}), and plan again",
                stacklevel=6,
            )

    # Gradients of earlier backwards.

    def _look_for_gradients(self, plan: Plan) -> None:
        """Count gradients that are there when a step begins, if the plan in force has no room for them."""
        if plan is not self._trained[0]:
            # What torch.func.functional_call puts in their place may be computed, and is then no leaf.
            self._trained = plan, [weakref.ref(p) for p in self._around.parameters() if p.is_leaf]
        gradients = [p.grad for reference in self._trained[1] if (p := reference()) is not None]
        held_bytes = sum(gradient.nbytes for gradient in gradients if type(gradient) is torch.Tensor)
        if not held_bytes or plan.peak_bytes + held_bytes <= plan.budget_bytes:
            return
        self._has_gradients_counted = True
        if FINDS in plan.fingerprint or plan.static_bytes.get("gradients"):
            return  # it was made for a step that begins with them
        if not self._is_fixed:
            options = self._asked or self._options
            self._asked = replace(options, training=replace(options.training, gradient_accumulation=True))
            return
        warnings.warn(
            f"{self._around.name} is called while it holds {format_bytes(held_bytes)} of gradients of earlier "
            f"backwards. Its plan has {format_bytes(plan.budget_bytes - plan.peak_bytes)} of the budget left for them: "
            "pass training=Training(gradient_accumulation=True) to auto_wrap, or free them before each step with "
            "zero_grad(set_to_none=True)",
            stacklevel=6,
        )

    # The optimizer.

    def see_optimizer(self, optimizer: Optimizer) -> None:
        """Count the state of an optimizer that steps this model's parameters, if the plan does not."""
        plan, options = self.plan, self._options
        if plan is None or options.budget.size is None or optimizer in self._optimizers:
            return
        alignment_bytes, parameters = self._around.spec().alignment_bytes, self._around.parameters()
        if not kept_for(optimizer, parameters, alignment_bytes):
            return  # of another model, or of stand-ins of its parameters
        self._optimizers.add(optimizer)
        kept_bytes = sum(kept_for(one, parameters, alignment_bytes) for one in self._optimizers)
        beyond_bytes = kept_bytes - plan.static_bytes.get("optimizer", 0)
        exceeds = beyond_bytes > 0 and plan.peak_bytes + beyond_bytes > plan.budget_bytes
        if not self._is_fixed and (exceeds or beyond_bytes > _LEAST * plan.budget_bytes):
            self._asked = replace(self._asked or options, optimizer=self._around.optimizer())
        elif exceeds:
            _warn_of(optimizer, beyond_bytes, self._around.name, plan)


_WORTH, _LEAST = 0.01, 0.002
"""Shares of the budget for which the step is planned again: of outputs that are dropped, and of optimizer state."""

_observed: weakref.WeakSet[ObservedCalls] = weakref.WeakSet()


def _are_there(storages: Iterable[weakref.ref[Any]]) -> bool:
    """Whether any of these is held, and not by garbage: an error that planning caught may be in a cycle with frames."""
    if all(storage() is None for storage in storages):
        return False
    gc.collect()
    return any(storage() is not None for storage in storages)


def _drops(options: Options) -> bool:
    return outputs_of(options) == DROPPED


def with_outputs(options: Options, outputs: str) -> Options:
    """Return the options for a loop that holds the model's outputs, or drops them."""
    return replace(options, training=replace(options.training, outputs=outputs))


def _warn_of(optimizer: Optimizer, kept_bytes: int, model: str, plan: Plan) -> None:
    name, size = type(optimizer).__name__, format_bytes(kept_bytes)
    counted = repr(name.lower()) if name.lower() in OPTIMIZERS else f"Training(reserve={size!r})"
    warnings.warn(
        f"{name} keeps {size} of state for {model}, and its plan has "
        f"{format_bytes(plan.budget_bytes - plan.peak_bytes)} of the budget left for it: pass "
        f"training={counted} to auto_wrap, so that it is counted",
        stacklevel=5,
    )


def _after_optimizer_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Let each wrapped model look at an optimizer that steps for the first time."""
    if torch.compiler.is_compiling():
        return
    for calls in list(_observed):
        calls.see_optimizer(optimizer)


register_optimizer_step_post_hook(_after_optimizer_step)
