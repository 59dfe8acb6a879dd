"""Observe the loop around a wrapped model, and plan again for what it holds beside the model's own step.

Nothing of that is known when the model is wrapped. So the first plan counts every output to the end of the backward,
the optimizer that exists, no gradients of earlier backwards, no loss outside and no other call; later plans are for
what the steps showed.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
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
from planner.capture.inputs import Inputs, state_of
from planner.capture.model_facts import of_model
from planner.capture.torch_internals import at_end_of_backward, entered, is_transformed, storage_of, storages_on_cpu
from planner.capture.trees import leaf_tensors, leaves_of, tensors_in
from planner.common.options import AUTO, DROPPED, HELD, KEPT, OPTIMIZERS
from planner.common.units import format_bytes, parse_size
from planner.errors import InfeasibleBudgetError
from planner.ir.static_memory import FINDS, LossMemory
from planner.measure.devices import device_spec
from planner.measure.optimizers import OptimizerMemory, kept_for, memory_of_existing
from planner.plans.plan import Plan
from planner.report.verdict import brief
from planner.runtimes import ReplannedModel
from planner.runtimes._whole_step import LoggedStep, WholeStep, awaiting, close_step, close_step_if_over, step_with
from planner.session.rank_consensus import made_by_all
from planner.session.step import Options, outputs_of

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

Start = Callable[[Options, Plan | None], ReplannedModel]
"""Starts the runtime under options, and a plan if there is one for them."""

_STEPS = 4
"""How many steps are observed."""

_ORDER = (DROPPED, HELD, KEPT)
"""What a loop may do with outputs, by what it needs."""


@dataclass(frozen=True)
class Observable:
    """What is observed of: a model, and whether one process trains all of it."""

    model: Callable[[], nn.Module]
    target: str | None
    """The device that is planned for, by name, if it is not the model's."""
    is_alone: bool
    """Several ranks measure no whole steps, which differ between them."""
    plan_together: bool
    """Whether several ranks plan together, and so can agree on what they observed."""
    has_loss: bool
    """Whether the user gave the loss that is computed outside."""

    @property
    def is_observed(self) -> bool:
        """Whether anything is observed."""
        return self.is_alone or self.plan_together

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self.model()).__name__

    def device(self) -> torch.device:
        """Return where the model is now: it may have moved since it was wrapped."""
        return of_model(self.model())

    def spec(self) -> DeviceSpec:
        """Describe the device that is planned for."""
        return device_spec(self.device(), self.target)

    def parameters(self) -> list[nn.Parameter]:
        """Return each parameter once."""
        return [*self.model().parameters()]

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return all that the model has."""
        return state_of(self.model()).values()

    def optimizer(self) -> OptimizerMemory | None:
        """Return what the optimizers that exist need."""
        spec = self.spec()
        return memory_of_existing(self.parameters(), alignment_bytes=spec.alignment_bytes, device_kind=spec.kind)


def before_observing(options: Options, around: Observable) -> Options:
    """Return the options with what the first plan assumes: outputs are held, and the optimizer that exists is used.

    What the user says of either stays as it is.
    """
    if options.training.outputs == AUTO:
        options = trained(options, outputs=HELD)
    if options.training.optimizer != "none" or options.reused_plan is not None or not around.is_observed:
        return options
    return replace(options, optimizer=around.optimizer())


def or_dropped(run: Callable[[Options], Result], options: Options, *, may_drop: bool) -> Result:
    """Run under options; if no plan with all outputs fits, run for a loop that drops them, which is the likely one."""
    try:
        return run(options)
    except InfeasibleBudgetError:
        if not may_drop or _drops(options):
            raise
    return run(trained(options, outputs=DROPPED))


class ObservedCalls:
    """What ``model(...)`` runs: a runtime, and another one in its place once the loop is known.

    ``may_drop`` says that the user leaves outputs to this. A plan that was given is kept: of it is only said what it
    does not count.
    """

    def __init__(self, around: Observable, options: Options, start: Start, plan: Plan | None, may_drop: bool) -> None:
        self.around, self._options, self._start, self._may_drop = around, options, start, may_drop
        self._is_fixed = options.reused_plan is not None or not around.is_observed
        self._to_agree = 0 if self._is_fixed or around.is_alone else _STEPS + 1
        """Before how many more calls ranks agree on what they observed."""
        self._running = start(options, plan)
        self.asked: Options | None = None
        """Options for what was observed, to be in force from the next call on."""
        self._to_watch = _STEPS if self._may_drop or _drops(options) else 0
        self._last: list[weakref.ref[Any]] = []
        """The storages of the outputs of the last call that was watched."""
        self.seen: tuple[int, bool] | None = None
        """Their bytes, and whether they were there when its backward had ended."""
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those whose state is counted."""
        self._num_kept: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many values an optimizer kept when their bytes were counted, which takes as long as a kernel."""
        self._is_first, self._has_changed = True, False
        self._before: weakref.WeakSet[Any] = weakref.WeakSet()
        """Storages that were on a CPU before the first call."""
        # A budget for what a step adds is not for what is there before it.
        self._has_gradients_counted = options.training.gradient_accumulation or options.budget.size is None
        self._trained: tuple[Plan | None, list[tuple[weakref.ref[nn.Module], str]]] = None, []
        """Where parameters were under the last plan: collecting them takes as long as a dozen small operations."""
        self._known_calls: list[Any] = []
        """What calls were like that need no new capture."""
        self._kind = -1
        """Which of these the last call is like."""
        self._plans: dict[int, tuple[Plan, int, Plan]] = {}
        """By its identity, a plan as it was made, for which of these, and as it was measured or replayed."""
        may_measure = around.is_alone and not self._is_fixed and options.budget.size is not None
        self._to_measure = _MEASURED if may_measure else 0
        reserve = options.training.reserve
        self._reserve_bytes = parse_size(reserve, whole_bytes=around.spec().memory_bytes) if reserve else 0
        """What the user keeps free of the budget."""
        self._logged: list[tuple[LoggedStep, Plan, bool, int]] = []
        """Steps that were measured, the plan then, whether an optimizer's state was there, and bytes of gradients."""
        self._found_bytes = 0
        """Of gradients, when the last one began."""
        self._is_said = self._is_told = self._is_cut = False
        self.was_logged = False
        """Whether the last step was measured."""
        self.is_asked = False
        """Whether somebody asks for the peak of the next step."""
        self.step_bytes: int | None = None
        """The most that a whole step held under the plan in force."""
        _observed.add(self)

    @property
    def plan(self) -> Plan | None:
        """The plan in force, with what a measured step held under it."""
        plan = self._running.plan
        return self._plans[id(plan)][-1] if id(plan) in self._plans else plan

    @property
    def seen_around(self) -> tuple[str, ...]:
        """What was seen around the model and is planned for, in words."""
        options, loss = self._options, self._options.loss
        beside_bytes = self.plan.static_bytes.get("reserve", 0) - self._reserve_bytes if self.plan is not None else 0
        outputs = outputs_of(options)
        seen = {
            "a background process is looking for a better plan": self._running.is_searching,
            f"outputs are {outputs}": self._may_drop and outputs != HELD,
            "gradients of earlier backwards are in memory when a step begins": options.training.gradient_accumulation,
            "an optimizer's state is counted": options.optimizer is not None and options.training.optimizer == "none",
            f"{format_bytes(beside_bytes)} are left for other calls, models and hooks": beside_bytes > _SCALARS,
        }
        if loss is not None and not self.around.has_loss:
            held_bytes = loss.working_bytes + loss.held_bytes
            seen[f"a loss outside the model takes {format_bytes(held_bytes)}"] = True
        return tuple(line for line, is_so in seen.items() if is_so)

    def stop(self) -> None:
        """Undo what was done to the model's parts."""
        close_step()
        _observed.discard(self)
        self._running.stop()

    @property
    def wants_measure(self) -> bool:
        """Whether the next step is to be measured."""
        return self.is_asked or self._to_measure > 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, planned if gradients are on."""
        if not torch.is_grad_enabled() or is_transformed():
            close_step_if_over()
            return self._running(*args, **kwargs)
        if self._is_first:
            self._is_first = False
            if not self._is_fixed and self._options.optimizer is None:
                # It may have been made after the model was wrapped.
                found = before_observing(self._options, self.around)
                self.asked = found if found.optimizer is not None else None
            if self.wants_measure and self.around.device().type == "cpu":
                own = {*map(storage_of, tensors_in([*self.around.tensors()]))}  # a loop may assign others, and keep it
                self._before.update(storage for storage in storages_on_cpu() if storage not in own)
        if self.seen is not None and self._to_watch:
            self._conclude(self.seen[0], are_held=self.seen[1])
        if not self._has_gradients_counted and self.plan is not None:
            self._look_for_gradients(self.plan)
        if self._to_agree:
            self._agree()
        step = step_with(self, may_be_logged=self.wants_measure and self._is_known(args, kwargs))
        if step.is_logged:
            self._tell_found(step, (args, kwargs))
        elif self._is_fixed or not self.around.is_alone or self._options.budget.size is None:
            self._warn_of_others(awaiting())
        if self.asked is not None:
            return self._watched(step, self._planned_anew(self.asked, args, kwargs))
        if self.plan is None:
            return self._watched(step, self._first_planned(lambda: self._running(*args, **kwargs)))
        return self._watched(step, self._running(*args, **kwargs))

    def _is_known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is like an earlier one, so that nothing is captured."""
        leaves = leaves_of((args, kwargs))
        like = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
        is_known = like in self._known_calls and self.asked is None
        if like not in self._known_calls:
            self._known_calls.append(like)
        self._kind = self._known_calls.index(like)
        return is_known

    def _agree(self) -> None:
        """Ask for what any rank asks for, or asks no more: they plan together, before the same call."""
        options, own = self._options, self.asked or self._options

        def wishes(of: Options) -> tuple[int, bool, bool]:
            accumulates = of.training.gradient_accumulation
            return _ORDER.index(outputs_of(of)), accumulates, of.optimizer is not options.optimizer

        with entered(self.around.device()):
            everyone = made_by_all(lambda: wishes(own), "observed its loop")
        agreed = tuple(map(max, zip(*everyone, strict=True)))
        self.asked = None
        if agreed != wishes(options):
            outputs, accumulates, has_optimizer = agreed
            training = replace(options.training, outputs=_ORDER[outputs], gradient_accumulation=accumulates)
            optimizer = own.optimizer or self.around.optimizer() if has_optimizer else options.optimizer
            self.asked = replace(options, training=training, optimizer=optimizer)
        self._to_agree -= 1
        if not self._to_agree:  # what one rank alone sees from now on is only said
            self._is_fixed, self._to_watch = True, 0

    def plan_for(self, inputs: Inputs) -> Plan:
        """Plan the first call ahead of it."""
        plan = self._first_planned(lambda: self._running.plan_for(inputs))
        self._tell_once(plan)
        return plan

    def _tell_once(self, plan: Plan | None) -> None:
        """Say in one line what the first plan comes to; of several ranks one does."""
        if plan is not None and not self._is_told and os.environ.get("RANK", "0") == "0":
            print(brief(plan), file=sys.stderr)
        self._is_told = True

    def _first_planned(self, run: Callable[[], Result]) -> Result:
        """Plan or run the first call, for a loop that drops outputs if no other plan fits."""

        def run_under(options: Options) -> Result:
            if options is not self._options:
                self._start_anew(options)
            return run()

        return or_dropped(run_under, self._options, may_drop=self._may_drop)

    def _planned_anew(self, asked: Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call under a plan for what was observed; if there is none, under the plan before.

        That may not be where it takes outputs to be dropped that the loop holds: the InfeasibleBudgetError is raised.
        """
        running, options, before = self._running, self._options, self._running.plan
        self._start_anew(asked)
        if before is None:
            return self._first_planned(lambda: self._running(*args, **kwargs))
        try:
            if self._logged:
                self._fit(Inputs(args, kwargs), before)
            return self._running(*args, **kwargs)
        except InfeasibleBudgetError as error:
            if _drops(options) and not _drops(asked):
                error.add_note("planner: the loop holds the model's outputs, which the old plan assumed to be dropped")
                raise
            if self._running is running and not running.plan_anew(options):
                running = self._start(options, before)
            self._running, self._options = running, options
            self._is_fixed, self._is_said, self._to_watch, self._to_measure, self._to_agree = True, True, 0, 0, 0
            if (asked.loss, asked.training.reserve) != (options.loss, options.training.reserve):
                uncounted = "what the step holds beside this call (a loss outside the model, other calls, other models)"
            elif asked.optimizer is not options.optimizer:
                uncounted = "what the optimizer keeps"
            elif asked.training.gradient_accumulation and not options.training.gradient_accumulation:
                uncounted = "the gradients of earlier backwards, which zero_grad() before each step would free"
            elif _drops(asked):
                return self._running(*args, **kwargs)
            else:
                uncounted = "the outputs of a call, which the loop keeps until the next one returns"
            warnings.warn(f"{error}. The plan in force stays, and does not count {uncounted}", stacklevel=6)
        return self._running(*args, **kwargs)

    def _fit(self, inputs: Inputs, before: Plan) -> None:
        """Plan a call until the step that was logged, replayed under its plan, just keeps the budget.

        InfeasibleBudgetError says that no plan leaves more room than the one before.
        """
        tried: dict[int, tuple[int, Options]] = {}
        """By what a call allocates: what the step holds."""
        logged, models = self._logged[-1][0], self._logged[-1][0].models()
        others = [model for model in models if model is not self and model.asked is not None]
        # Other models of the step that are yet to be planned again take their share of what it is above the budget.
        left_bytes = max(0, logged.held_bytes - before.budget_bytes) * len(others) // len(models)
        left_bytes -= _SCALARS  # targets and metrics that a log need not see
        for _ in range(_ATTEMPTS):
            options, reserve = self._options, self._options.training.reserve
            try:
                with entered(self.around.device()):
                    plan = self._running.plan_for(inputs)
            except InfeasibleBudgetError as error:
                if not isinstance(reserve, int):
                    raise
                reserve -= error.minimum_feasible_peak_bytes - before.budget_bytes
                if reserve <= before.static_bytes.get("reserve", 0) and not tried:
                    raise
                self._start_anew(trained(options, reserve=max(reserve, self._reserve_bytes)))
                continue
            own_bytes, held = plan.peak_bytes - plan.total_static_bytes, self._replayed(plan)
            if not held or None in held or own_bytes in tried:
                break
            held_bytes, slope = max(filter(None, held)) - left_bytes, float(models.count(self))
            for other_bytes, (beside_bytes, _) in tried.items():
                slope = max((held_bytes - beside_bytes) / (own_bytes - other_bytes), 0.5)
            tried[own_bytes] = held_bytes, options
            room = 1 - held_bytes / plan.budget_bytes
            if 0 <= room <= _NEAR or (room > 0 and not plan.recomputations):
                break
            self._start_anew(trained(options, reserve=self._reserve_for(plan, held_bytes, slope)))
        if tried:
            fitting = [own for own, (held_bytes, _) in tried.items() if held_bytes <= before.budget_bytes]
            _, options = tried[max(fitting) if fitting else min(tried)]
            if options is not self._options:
                self._start_anew(options)

    def _reserve_for(self, plan: Plan, held_bytes: int, slope: float) -> int:
        """Return what is to be left free so that a step that held this just keeps the budget.

        With each byte less that a call allocates it holds ``slope`` bytes less.
        """
        free_bytes = plan.static_bytes.get("reserve", 0) + plan.budget_bytes - plan.peak_bytes
        return max(self._reserve_bytes, free_bytes + int((held_bytes - plan.budget_bytes) / slope))

    def _replayed(self, plan: Plan) -> list[int | None]:
        """Return what each step that was logged holds under a plan; None where it cannot be said."""
        _, kind, _ = self._plans.get(id(plan), (plan, self._kind, plan))
        held = [
            logged.held_bytes if before is plan else logged.under(self, plan)
            for logged, before, *_ in self._logged
            if logged.kinds == {kind} and _resident_bytes(before) == _resident_bytes(plan)
        ]
        return [held_bytes and held_bytes + self._reserve_bytes + _beyond(plan) for held_bytes in held]

    def predict(self) -> None:
        """Take the most that logged steps hold under the plan in force for its prediction."""
        plan, kind, shown = self._plans.get(id(self._running.plan), (None, 0, None))
        if plan is None or shown is None or not any(held := self._replayed(plan)):
            return
        held_bytes = min(max(filter(None, held)), plan.budget_bytes) - _beyond(plan)
        if not shown.peak_bytes - _SCALARS <= held_bytes <= shown.peak_bytes:
            self._plans[id(plan)] = plan, kind, plan.holding(held_bytes)

    def _start_anew(self, options: Options) -> None:
        """Start the runtime under other options."""
        same, plan = outputs_of(options) == outputs_of(self._options), self.plan
        budget = replace(options.budget, at_least_bytes=0)  # what other outputs are a percentage of is another step
        options = replace(options, budget=budget.after(plan.budget_bytes) if same and plan else budget, eager=None)
        self._options, self.asked = options, None
        if not self._running.plan_anew(options):
            self._running = self._start(options, None)

    # Outputs.

    def _watched(self, step: WholeStep, result: Any) -> Any:
        """Return what a call did, and look at the end of the backward which outputs the loop still holds.

        The caller has no name for the result: an error that was caught keeps the frames below it, and all their names.
        """
        made = self._running.plan
        if made is not None and id(made) not in self._plans:
            is_largest = made.peak_bytes > max((known.peak_bytes for known, *_ in self._plans.values()), default=0)
            if is_largest and self._plans and not self._is_fixed and self._options.budget.size is not None:
                self._to_measure = max(self._to_measure, 2)
            self._plans[id(made)] = made, self._kind, made
            # What several models hold together is another for each of them.
            for model in dict.fromkeys([self, *(model for logged, *_ in self._logged for model in logged.models())]):
                model.predict()
            self._tell_once(self.plan)
            step.close(is_spoiled=True)
        if not self._to_watch and not step.is_logged:
            self.was_logged = False
            step.returned(self, result)
            return result
        tensors, own = leaf_tensors(result), {id(storage_of(tensor)) for tensor in self.around.tensors()}
        storages = {id(s): s for t in tensors if t.dim() and t.layout is torch.strided for s in [storage_of(t)]}
        references = [weakref.ref(storage) for key, storage in storages.items() if key not in own]
        size_bytes = sum(storage.nbytes() for key, storage in storages.items() if key not in own)
        step.returned(self, result)
        starts = [tensor for tensor in tensors if tensor.requires_grad]
        reference = weakref.ref(self)

        def ended() -> None:
            if (observer := reference()) is not None:
                observer.seen = size_bytes, _are_there(references)

        self._last, self.was_logged = references, step.is_logged
        if references and starts and self._to_watch:
            at_end_of_backward(starts, ended)
        return result

    def _conclude(self, size_bytes: int, *, are_held: bool) -> None:
        """Ask for another plan if the loop does otherwise with outputs than the one in force assumes."""
        is_first, plan = self._to_watch == _STEPS, self.plan
        self.seen, self._to_watch = None, self._to_watch - 1
        now, assumed = KEPT if _are_there(self._last) else HELD if are_held else DROPPED, outputs_of(self._options)
        if now == assumed or plan is None:
            return
        is_more = _ORDER.index(now) > _ORDER.index(assumed)
        exceeds = is_more and plan.peak_bytes + size_bytes > plan.budget_bytes
        gains = not is_more and plan.recomputations and size_bytes >= _WORTH * plan.budget_bytes
        if not exceeds and (self._has_changed or not gains or (is_first and self._to_measure)):
            return  # another plan takes seconds, and this one keeps the budget: the next step may show more
        if self._may_drop:
            _log.info("outputs (%s) are %s: the step is planned again", format_bytes(size_bytes), now)
            self.asked, self._has_changed = trained(self.asked or self._options, outputs=now), True
        elif is_more:
            warnings.warn(
                f"{format_bytes(size_bytes)} of outputs are {now} by the loop, and the plan assumes them to be "
                f"{assumed}: pass training=Training(outputs={now!r}), and plan again",
                stacklevel=6,
            )

    # Gradients of earlier backwards.

    def _look_for_gradients(self, plan: Plan) -> None:
        """Count gradients that are there when a step begins, if the plan in force has no room for them."""
        held_bytes = sum(gradient.nbytes for gradient in self._gradients() if type(gradient) is torch.Tensor)
        known_bytes = max((found_bytes for *_, found_bytes in self._logged), default=0)
        if held_bytes <= known_bytes or plan.peak_bytes + held_bytes <= plan.budget_bytes:
            return
        self._has_gradients_counted = True
        if FINDS in plan.fingerprint or plan.static_bytes.get("gradients"):
            return  # it was made for a step that begins with them
        if not self._is_fixed:
            options = self.asked or self._options
            self.asked = trained(options, gradient_accumulation=True)
            return
        warnings.warn(
            f"{self.around.name} is called while it holds {format_bytes(held_bytes)} of gradients of earlier "
            f"backwards. Its plan has {format_bytes(plan.budget_bytes - plan.peak_bytes)} of the budget left for them: "
            "pass training=Training(gradient_accumulation=True) to auto_wrap, or free them before each step with "
            "zero_grad(set_to_none=True)",
            stacklevel=6,
        )

    # Whole steps.

    def tensors(self) -> list[torch.Tensor]:
        """Return what the model has, what its optimizers keep for it, and its gradients."""
        states = [one.state.get(p, {}) for one in self._optimizers for p in self.around.parameters()]
        return tensors_in([*self.around.tensors(), *self._gradients(), *states])

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients that are there."""
        if self.plan is not self._trained[0]:
            named = [(module, module.named_parameters(recurse=False)) for module in self.around.model().modules()]
            places = {id(p): (weakref.ref(module), name) for module, own in named for name, p in own}
            self._trained = self.plan, [*places.values()]
        modules = ((module, name) for reference, name in self._trained[1] if (module := reference()) is not None)
        parameters = (getattr(module, name, None) for module, name in modules)  # load_state_dict may assign others
        # What torch.func.functional_call puts in their place may be computed, and is then no leaf.
        return [p.grad for p in parameters if p is not None and p.is_leaf and p.grad is not None]

    def _tell_found(self, step: WholeStep, given: Any) -> None:
        """Say what a call finds of its own on the device, and on a CPU, which does not say, what is there beside it."""
        static = self.plan.static_bytes if self.plan is not None else {}
        inputs = weakref.WeakSet(map(storage_of, tensors_in(given)))
        found, size_bytes = list[Any](), static.get("inputs", 0)
        if step.calls:  # other inputs are made in the step
            size_bytes = sum(storage.nbytes() for storage in inputs & self._before - step.inputs)
        if not step.calls or self not in step.models():
            self._found_bytes = sum(gradient.nbytes for gradient in self._gradients())
            gradients = [] if "communication buffers" in static else tensors_in(self._gradients())
            found = [*map(storage_of, gradients), *(storage for each in self._last if (storage := each()) is not None)]
            size_bytes += sum(size for kind, size in static.items() if kind not in ("gradients", "reserve", "inputs"))
        if not step.calls and self._before:  # all that has come since the first call, and is no model's
            tensors = (tensor for model in step.models() for tensor in model.tensors())
            known = self._before | inputs | {*found, *map(storage_of, tensors)}
            if any(storage.nbytes() and storage not in known for storage in storages_on_cpu()):
                gc.collect()  # an error that planning caught is in a cycle with its frames, and so with their tensors
            found += [storage for storage in storages_on_cpu() if storage not in known]
        step.inputs |= inputs
        step.kinds.add(self._kind)
        step.find(size_bytes, found)

    def see_step(self, logged: LoggedStep, loss: LossMemory | None) -> None:
        """Plan for what a whole step held beside the model's own, where the plan in force has no room for it."""
        asked, plan, made = self.asked, self.plan, self._running.plan
        held_bytes = logged.held_bytes + self._reserve_bytes + (_beyond(made) if made is not None else 0)
        self.is_asked, self.step_bytes = False, held_bytes
        is_first_cut, self._is_cut = logged.is_cut and not self._is_cut, logged.is_cut
        if plan is None or made is None or not self._to_measure or is_first_cut:
            return  # later plans would pay for one interrupted backward
        self._to_measure -= 1
        is_whole = bool(self._optimizers) or "optimizer" not in plan.static_bytes
        self._logged.append((logged, made, is_whole, self._found_bytes))
        if held_bytes > plan.budget_bytes:
            options, known = asked or self._options, self._options.loss or LossMemory()
            known_bytes = known.working_bytes + known.held_bytes
            if loss is not None and loss.working_bytes > known_bytes + _SCALARS and not self.around.has_loss:
                self.asked = replace(options, loss=loss)
            else:
                # What other calls save grows with what this one does; if it is not known, what is run again may stay.
                slope = len(logged.calls) if logged.under(self, made) is not None else 0.5
                self.asked = trained(options, reserve=self._reserve_for(plan, held_bytes, slope))
        if self.asked is not asked:
            _log.info("a step of %s calls held %s: it is planned again", len(logged.calls), format_bytes(held_bytes))
            return
        # An optimizer's state is planned for before it is there.
        as_planned = [one for one in self._logged if one[1] is made and one[2]]
        if len(as_planned) >= _ENOUGH:
            self._logged, self._to_measure = as_planned, 0
        if as_planned or held_bytes > plan.peak_bytes + _beyond(made):
            self.predict()

    def _warn_of_others(self, waiting: list[ObservedCalls]) -> None:
        """Warn once of a call before the backward of another, where its plan is not made for both."""
        if not waiting or self._is_said:
            return
        self._is_said, name = True, self.around.name
        others = [calls.around.name for calls in waiting if calls is not self]
        warnings.warn(
            f"{name} is called before the backward of {others[0] if others else 'its last call'}. What both save is in "
            "memory together, but a budget of activations, a plan that was given and a plan of several ranks are for "
            "one call: call it once with all inputs, run each backward before the next call, or leave some room",
            stacklevel=6,
        )

    # The optimizer.

    def see_optimizer(self, optimizer: Optimizer) -> None:
        """Count the state of an optimizer that steps this model's parameters, if the plan does not."""
        plan, options = self.plan, self._options
        num_kept = _num_kept(optimizer)
        if plan is None or options.budget.size is None or self._num_kept.get(optimizer) == num_kept:
            return
        self._num_kept[optimizer] = num_kept
        alignment_bytes, parameters = self.around.spec().alignment_bytes, self.around.parameters()
        if not kept_for(optimizer, parameters, alignment_bytes):
            return  # of another model, or of stand-ins of its parameters
        self._optimizers.add(optimizer)
        kept_bytes = sum(kept_for(one, parameters, alignment_bytes) for one in self._optimizers)
        beyond_bytes = kept_bytes - plan.static_bytes.get("optimizer", 0)
        exceeds = beyond_bytes > 0 and plan.peak_bytes + beyond_bytes > plan.budget_bytes
        if not self._is_fixed and (exceeds or beyond_bytes > _LEAST * plan.budget_bytes):
            self.asked = replace(self.asked or options, optimizer=self.around.optimizer())
        elif exceeds:
            _warn_of(optimizer, beyond_bytes, self.around.name, plan)


_WORTH, _LEAST, _NEAR = 0.01, 0.002, 0.01
"""Shares of the budget for which the step is planned again: of outputs that are dropped, of optimizer state, and of
what a replayed step leaves free."""

_ATTEMPTS = 5
"""How many plans are made at most until a replayed step keeps the budget."""

_SCALARS = 4096
"""Bytes of a loss that is scaled, of metrics and the like, for which nothing is planned again."""

_MEASURED, _ENOUGH = 8, 3
"""How many whole steps are measured at most, and how many in a row if nothing is planned again for them."""

_observed: weakref.WeakSet[ObservedCalls] = weakref.WeakSet()


def _are_there(storages: Iterable[weakref.ref[Any]]) -> bool:
    """Whether any of these is held, and not by garbage: an error that planning caught may be in a cycle with frames."""
    if all(storage() is None for storage in storages):
        return False
    gc.collect()
    return any(storage() is not None for storage in storages)


def _beyond(plan: Plan) -> int:
    """Return the bytes by which an allocator's blocks are larger than what a plan, as it was made, asks for."""
    allocated_bytes = plan.reserved.allocated_bytes if plan.reserved is not None else 0
    return max(0, allocated_bytes + plan.static_bytes.get("reserve", 0) - plan.peak_bytes)


def _resident_bytes(plan: Plan) -> int:
    """Return what a plan counts around a step, without what is left free."""
    return plan.total_static_bytes - plan.static_bytes.get("reserve", 0)


def _num_kept(optimizer: Optimizer) -> int:
    """Return how many values an optimizer keeps: LBFGS adds to lists of one parameter from step to step."""
    kept = (value for state in optimizer.state.values() for value in getattr(state, "values", tuple)())
    return sum(len(value) if isinstance(value, (list, tuple, dict)) else 1 for value in kept)


def _drops(options: Options) -> bool:
    return outputs_of(options) == DROPPED


def trained(options: Options, **training: Any) -> Options:
    """Return the options for a loop of which something else is known."""
    return replace(options, training=replace(options.training, **training))


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
    if not torch.compiler.is_compiling():
        for calls in list(_observed):
            calls.see_optimizer(optimizer)


register_optimizer_step_post_hook(_after_optimizer_step)
