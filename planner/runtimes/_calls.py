"""Calls of a wrapped model, shared by all runtimes: which plan is in force, and when another is needed."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakMethod

import torch
from torch import nn

from planner.capture import torch_internals as internals
from planner.capture.hugging_face import masking_of
from planner.capture.inputs import Inputs, differentiable_in
from planner.capture.model_facts import finds_gradients, gradient_state, of_model, shards_of, unplanned_sharding
from planner.capture.module_internals import ddp_around, switches_and_sizes
from planner.capture.operands import settle
from planner.capture.parallel_events import Gradients
from planner.capture.trees import leaves_of
from planner.common.options import AUTO, Offload
from planner.errors import NoBackwardError
from planner.plans.plan import Plan
from planner.runtimes import Prepare, ReplannedModel
from planner.session.capture_progress import log_progress
from planner.session.eager_study import DEPENDS_ON_DATA
from planner.session.step import Options

MAY_BE_ABOVE = "gradients are right, and the peak may be above the predicted one"

_TRANSFORMED = "a plan is for loss.backward(), and not for transforms of torch.func (grad, vmap, jvp, ...):"

_WATCHED = "torch runs no captured graph under a dispatch mode (FlopCounterMode and the like):"

_AS_IT_IS = "runs as it is, and keeps no budget"


def weakly(method: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Return a function that calls a method without keeping its object alive, and gives None once the object is gone.

    torch's caches hold compiled code, and so whatever that code refers to.
    """
    reference = WeakMethod(method)

    def call() -> Any:
        found = reference()
        return None if found is None else found(*args)

    return call


def as_they_are(options: Options, _: Inputs) -> Options:
    """Return options that are complete for all inputs."""
    return options


class PlannedCalls(ABC):
    """The calls of one wrapped model: its options and the plan in force, across input sizes."""

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
        self.model, self.options, self.plan, self.prepare = model, options, plan, prepare or as_they_are
        self.is_confirmed = False
        """Whether a step matched the plan that was given."""
        self._must_match = plan is not None and not replan
        settle(of_model(model))  # a plan that is given, with a profile, runs nothing before the first step

    @property
    def must_match(self) -> bool:
        """Whether the plan that the caller gave may not be replaced: the first step must be the one it is for."""
        return self._must_match and not self.is_confirmed

    @property
    def known(self) -> dict[str, Any]:
        """What is known of the plan of a call: see :func:`planner.session.step.plan_study`."""
        return {"reuse": self.plan, "must_match": self.must_match}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, planned if gradients are on."""
        if self.runs_plainly():
            return internals.call_implementation(self.model)(*args, **kwargs)
        with internals.entered(of_model(self.model, args, kwargs)):
            return self.run(args, kwargs)

    @abstractmethod
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model as planned; its device is the current one."""

    @abstractmethod
    def plan_for(self, inputs: Inputs) -> Plan:
        """Plan a call ahead of it; see :class:`planner.runtimes.ReplannedModel`."""

    def runs_plainly(self) -> bool:
        """Whether this call runs the model as it is: without gradients, or where no plan can be carried out."""
        if internals.is_transformed():
            if torch.is_grad_enabled() and internals.is_in_torch_func():
                warnings.warn(f"{_TRANSFORMED} {type(self.model).__name__} {_AS_IT_IS}", stacklevel=7)
            return True
        if torch.is_grad_enabled() and self.needs_graphs and internals.is_watched():
            warnings.warn(f"{_WATCHED} {type(self.model).__name__} {_AS_IT_IS}", stacklevel=7)
            return True
        return not torch.is_grad_enabled()

    @property
    def is_searching(self) -> bool:
        """Whether a background search for a better plan is running."""
        return False

    def plan_anew(self, options: Options) -> bool:
        """Return False: what runs is made for one plan."""
        return False

    def stop(self) -> None:  # noqa: B027
        """Do nothing: between calls the model's parts are as they were."""

    def complete_options(self, inputs: Inputs) -> None:
        """Complete the options for these inputs; a percentage keeps the bytes that it came to before."""
        if internals.default_saved_tensors_hooks() is not None and self.options.offload.enabled == AUTO:
            # They may send what is saved to the host by themselves, and would copy places.
            self.options = replace(self.options, offload=Offload(False))
        self.options = self.prepare(self.options, inputs)

    def options_for_call(self) -> Options:
        """Return the options for this call, with the model's existing gradients, ranks and DDP buckets."""
        options, ddp = self.options, ddp_around(self.model)
        training, gradients = options.training, options.gradients
        if finds_gradients(self.model):
            training = replace(training, gradient_accumulation=True)
        if training.data_parallel == "none":
            way, ranks = ("fsdp2", shards_of(self.model)) if ddp is None else ("ddp", ddp.ranks)
            training = replace(training, data_parallel=way, ranks=ranks) if ranks > 1 else training
        if ddp is not None:
            gradients = Gradients(are_in_buckets=ddp.finds_views, go_into_buckets=ddp.has_views and ddp.sends)
        # All ranks come here with their first batch; with a later one that is new to it, each plans for itself.
        is_first = options.plan_collectively and not self.is_confirmed
        return replace(options, training=training, gradients=gradients, plan_collectively=is_first)

    def put_in_force(self, plan: Plan) -> None:
        """Put a plan in force; a percentage of the budget never falls below that of this step."""
        self.plan = plan
        self.options = self.options.after(plan)


Decided = tuple[Plan, Callable[[], AbstractContextManager[Any]]]
"""A plan, and a context that installs it in the model's submodules for one forward."""


class CallsInSituations(PlannedCalls):
    """Calls of the model's own code with submodules replaced; planned again if a call differs in more than data."""

    def __init__(self, model: nn.Module, options: Options, **settings: Any) -> None:
        super().__init__(model, options, **settings)
        self._decided: dict[Any, Decided] = {}
        self._without_backward: set[Any] = set()
        """Situations in which no output requires gradients, as where everything is frozen."""
        self._is_said = False
        """Whether it was said that data decide what runs."""

    @abstractmethod
    def decide(self, inputs: Inputs) -> Decided:
        """Plan a call."""

    def plan_for(self, inputs: Inputs) -> Plan:
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
                with log_progress(type(self.model).__name__) as done:
                    self._decided[situation] = self.decide(inputs)
                    done(why, self._decided[situation][0])
            except NoBackwardError:
                return self._run_plainly(inputs, situation)
        self.plan, installed = self._decided[situation]
        if not self._is_said and any(warning.rule == DEPENDS_ON_DATA for warning in self.plan.warnings):
            self._is_said = True
            warnings.warn(
                f"data decide what {type(self.model).__name__} runs: its plan is for the batch that was recorded, "
                "and another may need more. Leave some room in the budget",
                stacklevel=4,
            )
        with installed():
            return internals.call_implementation(self.model)(*args, **kwargs)

    def _run_plainly(self, inputs: Inputs, situation: Any) -> Any:
        """Run the model unplanned, since nothing in it trains; if an output requires gradients, plan the next call."""
        result = internals.call_implementation(self.model)(*inputs.args, **inputs.kwargs)
        if differentiable_in(result):
            self._without_backward.discard(situation)
        else:
            self._without_backward.add(situation)
        return result


def describe(inputs: Inputs, kinds: tuple[type, ...] = (bool, int, float, str)) -> tuple[Any, ...]:
    """Return the properties of inputs that plans depend on: of tensors, and all there is to leaves of other kinds."""
    return tuple(
        (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves_of((inputs.args, inputs.kwargs))
        if isinstance(leaf, (torch.Tensor, *kinds))
    )


def situation_of(model: nn.Module, inputs: Inputs) -> Any:
    """Return a key of everything that a plan depends on and calls may change: sizes, types, flags, autocast, mode.

    It is computed in every step, so it must be cheap.
    """
    kind = next((x.device.type for x in inputs.tensors()), "cpu")
    return (
        describe(inputs, (bool, str)),
        internals.autocast_dtype(kind),
        switches_and_sizes(model),
        masking_of(model, inputs),
    )


def check_sharding(model: nn.Module, blocks: Iterable[str] = (), ranks: int | None = None) -> None:
    """Warn of sharding or DDP hooks that a plan with ``blocks`` as units does not count on."""
    if found := unplanned_sharding(model, blocks, ranks):
        warnings.warn(
            f"{found}, and the plan counts on fully_shard(block) for each block and then for the model, without "
            f"that: {MAY_BE_ABOVE}",
            stacklevel=9,
        )
    ddp = ddp_around(model)
    if ddp is not None and ddp.has_hooks:
        warnings.warn(f"DDP has a communication hook, whose memory is not counted: {MAY_BE_ABOVE}", stacklevel=9)


class RuntimeOfCalls:
    """A runtime with one class of calls; bits and peaks are exact unless a subclass says otherwise."""

    calls: ClassVar[Any]
    tolerance = 0.0
    exact_peak = True
    runs_sharded = False
    runs_compiled_parts = False

    def start(self, model: nn.Module, options: Options, **settings: Any) -> ReplannedModel:
        """Start the calls; see :meth:`planner.runtimes.RuntimePlugin.start`."""
        return self.calls(model, options, **settings)
