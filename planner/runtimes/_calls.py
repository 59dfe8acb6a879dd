"""What runtimes share: the calls of one wrapped model, how they start, and when they need another plan."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakMethod

import torch
from torch import nn

from planner.capture.device import entered, of_model
from planner.capture.gradients import Gradients
from planner.capture.hugging_face import masking_of
from planner.capture.inputs import Inputs, differentiable_in
from planner.capture.module_internals import switches_and_sizes
from planner.capture.operands import settle
from planner.capture.parallel import (
    ddp_around,
    finds_gradients,
    gradient_state,
    shards_of,
    unplanned_sharding,
)
from planner.capture.torch_internals import call_implementation, is_transformed, is_watched
from planner.capture.trees import leaves_of
from planner.errors import NoBackwardError
from planner.plans.plan import Plan
from planner.runtimes import Prepare, Running
from planner.runtimes._arena import ArenaInUse, Arenas
from planner.runtimes._held_gradients import HeldGradients
from planner.runtimes._overlapping_calls import OpenCalls
from planner.session.capture_progress import working
from planner.session.eager_study import DEPENDS_ON_DATA
from planner.session.step import Options

MAY_BE_ABOVE = "gradients are right, and the peak may be above the predicted one"

_WATCHED = "torch runs no captured graph under a dispatch mode (FlopCounterMode and the like):"


def weakly(method: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Return a call that does not keep the method's object alive: torch's caches hold what was compiled, and so it.

    Where the object is gone, the call gives None.
    """
    reference = WeakMethod(method)

    def call() -> Any:
        found = reference()
        return None if found is None else found(*args)

    return call


class PlannedCalls(ABC):
    """The calls of one wrapped model: the plan in force, and what was asked of it, from one input size to the next."""

    needs_graphs: ClassVar[bool] = True
    """Whether the plan runs in captured graphs."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        plan: Plan | None = None,
        replan: bool = True,
        prepare: Prepare | None = None,
    ) -> None:
        self.model, self.options, self.plan, self.prepare = model, options, plan, prepare
        self.plans: dict[str, Plan] = {}
        self.is_confirmed = False
        """Whether the model was seen to be what the first plan is for."""
        self._must_match = plan is not None and not replan
        self._open = OpenCalls(model)
        settle(of_model(model))  # a plan that is given, with a profile, runs nothing before the first step
        self._held = HeldGradients(model, options)
        self._arenas = Arenas(model) if options.training.arena else None

    @property
    def must_match(self) -> bool:
        """Whether the plan that the caller gave may not be replaced: the first step must be the one it is for."""
        return self._must_match and not self.is_confirmed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, planned if gradients are on."""
        if self.runs_plainly():
            return call_implementation(self.model)(*args, **kwargs)
        if not self.options.is_stage:
            self._open.check()
        held_bytes = self._held.bytes_of(self.model, self.plan)
        with entered(of_model(self.model, args, kwargs)), self._placed(args, kwargs) as places_backward:
            result = self.run(args, kwargs)
            places_backward(result)
        self._open.begun(result)
        self._held.check(held_bytes, self.plan)
        return result

    def _placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Callable[[Any], None]]:
        """Give what a call allocates its places, if that was asked for; then its backward's, told what it returned."""
        if self._arenas is None:
            return nullcontext(lambda _result: None)
        return self._arenas.forward(situation_of(self.model, Inputs(args, kwargs)))

    @property
    def arena(self) -> ArenaInUse | None:
        """What the arena holds; None where there is none, or not yet."""
        return self._arenas.in_use if self._arenas is not None else None

    @abstractmethod
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model as planned; its device is the current one."""

    def runs_plainly(self) -> bool:
        """Whether this call runs the model as it is: without gradients, or where no plan can be carried out."""
        if is_transformed():
            return True
        if torch.is_grad_enabled() and self.needs_graphs and is_watched():
            warnings.warn(f"{_WATCHED} {type(self.model).__name__} runs as it is, and keeps no budget", stacklevel=7)
            return True
        return not torch.is_grad_enabled()

    def stop(self) -> None:
        """Let nothing have a place any more: between calls the model's parts are as they were."""
        if self._arenas is not None:
            self._arenas.stop()

    def complete_options(self, inputs: Inputs) -> None:
        """Complete the options for these inputs; what a percentage came to before still holds."""
        if self.prepare is not None:
            self.options = replace(self.prepare(inputs), budget=self.options.budget)

    def options_for_call(self) -> Options:
        """Return the options for the call that begins, with what is seen of how its gradients come and go."""
        options, ddp = self.options, ddp_around(self.model)
        training, gradients = options.training, options.gradients
        if finds_gradients(self.model):
            training = replace(training, gradient_accumulation=True)
        if training.data_parallel == "none":
            way, ranks = ("fsdp2", shards_of(self.model)) if ddp is None else ("ddp", ddp.ranks)
            training = replace(training, data_parallel=way, ranks=ranks) if ranks > 1 else training
        if ddp is not None:
            gradients = Gradients(
                are_in_buckets=ddp.finds_views,
                go_into_buckets=ddp.has_views and ddp.sends,
            )
        return replace(options, training=training, gradients=gradients)

    def put_in_force(self, plan: Plan) -> None:
        """Let a new plan be the one in force: a percentage is then of its step at least."""
        self.plan = self.plans[str(plan.fingerprint["inputs"])] = plan
        self.options = self.options.after(plan)


Decided = tuple[Plan, Callable[[], AbstractContextManager[Any]]]
"""A plan for some calls, and what replaces parts of the model for as long as a forward lasts."""


class CallsInSituations(PlannedCalls):
    """Calls of the model itself, with parts of it replaced: decided anew where a call differs in more than data."""

    def __init__(self, model: nn.Module, options: Options, **settings: Any) -> None:
        super().__init__(model, options, **settings)
        self._decided: dict[Any, Decided] = {}
        self._without_backward: set[Any] = set()
        """Situations in which nothing requires gradients, as where everything is frozen."""
        self._is_said = False
        """Whether it was said that data decide what runs."""

    @abstractmethod
    def decide(self, inputs: Inputs) -> Decided:
        """Plan a call."""

    def plan_for(self, inputs: Inputs) -> Plan:
        """Plan a call ahead of it."""
        situation = self.situation(inputs)
        self._decided[situation] = self.decide(inputs)
        return self._decided[situation][0]

    def situation(self, inputs: Inputs) -> Any:
        """Return all that a plan depends on, as far as it can change between calls."""
        return situation_of(self.model, inputs), gradient_state(self.model)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model with parts of it replaced."""
        inputs = Inputs(args, kwargs)
        situation = self.situation(inputs)
        if situation in self._without_backward:
            return self._run_plainly(inputs, situation)
        if situation not in self._decided:
            why = "a call unlike the earlier ones" if self._decided else "the first call"
            try:
                with working(self.model) as done:
                    self._decided[situation] = self.decide(inputs)
                    done(why, self._decided[situation][0])
            except NoBackwardError:
                return self._run_plainly(inputs, situation)
        self.plan, installed = self._decided[situation]
        if not self._is_said and any(warning.rule == DEPENDS_ON_DATA for warning in self.plan.warnings):
            self._is_said = True
            warnings.warn(
                f"what {type(self.model).__name__} runs depends on data: its plan is for the batch that was recorded, "
                "and another may need more. Leave some room in the budget",
                stacklevel=4,
            )
        with installed():
            return call_implementation(self.model)(*args, **kwargs)

    def _run_plainly(self, inputs: Inputs, situation: Any) -> Any:
        """Run the model as it is, since nothing of it trains: should something do so after all, the next is planned."""
        result = call_implementation(self.model)(*inputs.args, **inputs.kwargs)
        if differentiable_in(result):
            self._without_backward.discard(situation)
        else:
            self._without_backward.add(situation)
        return result


def situation_of(model: nn.Module, inputs: Inputs) -> Any:
    """Return all that a step's plan depends on, as far as it can change between calls: two are equal or not.

    It is asked in every step, so it is quick to find.
    """
    leaves = leaves_of((inputs.args, inputs.kwargs))
    described = tuple(
        (x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in leaves
        if isinstance(x, (torch.Tensor, bool, str))
    )
    kind = next((x.device.type for x in leaves if isinstance(x, torch.Tensor)), "cpu")
    can_cast = torch.amp.is_autocast_available(kind)
    cast = can_cast and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return described, cast, switches_and_sizes(model), masking_of(model, inputs)


def check_sharding(model: nn.Module, blocks: Iterable[str] = (), ranks: int | None = None) -> None:
    """Warn of a sharding that a plan does not count on, which is for ``blocks`` as units, and of hooks of DDP's."""
    if found := unplanned_sharding(model, blocks, ranks):
        warnings.warn(
            f"{found}, and the plan counts on fully_shard(block) for each block and then for the model, without "
            f"that: {MAY_BE_ABOVE}",
            stacklevel=9,
        )
    ddp = ddp_around(model)
    if ddp is not None and ddp.has_hooks:
        warnings.warn(f"DDP has a communication hook, and what that holds is not counted: {MAY_BE_ABOVE}", stacklevel=9)


class StartsCalls:
    """A runtime whose calls are those of one class, and whose numbers and peaks are exact."""

    calls: ClassVar[Any]
    tolerance = 0.0
    exact_peak = True
    runs_sharded = False
    runs_compiled_parts = False

    def start(self, model: nn.Module, options: Options, **settings: Any) -> Running:
        """Start the calls; see :meth:`planner.runtimes.Runtime.start`."""
        running: Running = self.calls(model, options, **settings)
        return running
