"""Runs the model as it is, with chosen modules under ``torch.utils.checkpoint``: nothing is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.checkpoints import modules_of
from planner.eager_session import plan_eager
from planner.errors import PlanMismatchError
from planner.inputs import Inputs, check_device, check_own_checkpointing
from planner.planning import Plan
from planner.runtimes import Prepare
from planner.runtimes._contexts import Kept, contexts
from planner.runtimes._situation import situation_of
from planner.session import Options
from planner.torch_internals import call_implementation, install_call, installed_call, uninstall_call


class ModulesRuntime:
    """What ``model(...)`` runs while a plan is in force.

    The first call with gradients records a step and plans it; calls of other sizes or settings are
    recorded again, and the choice of modules is carried over if the simulator says that it fits.
    Modules are replaced during the forward only.

    Parameters
    ----------
    model, options, plan, replan, prepare
        See :meth:`planner.runtimes.Runtime.start`.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        plan: Plan | None = None,
        replan: bool = True,
        prepare: Prepare | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.plan = plan
        self.replan = replan
        self.prepare = prepare
        self._chosen: dict[Any, tuple[tuple[nn.Module, Kept], ...]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with checkpoints if gradients are on."""
        if not torch.is_grad_enabled():
            return call_implementation(self.model)(*args, **kwargs)
        inputs = Inputs(args, kwargs)
        situation = situation_of(self.model, inputs)
        if situation not in self._chosen:
            self._chosen[situation] = self._choose(inputs)
        with _checkpointed(self._chosen[situation]):
            return call_implementation(self.model)(*args, **kwargs)

    def stop(self) -> None:
        """Do nothing: between calls the model's parts are as they were."""

    def _choose(self, inputs: Inputs) -> tuple[tuple[nn.Module, Kept], ...]:
        if self.prepare is not None:
            self.options = self.prepare(inputs)
        must_match = self.plan is not None and not self._chosen and not self.replan
        self.plan = _plan(self.model, inputs, self.options, self.plan, must_match)
        by_name = dict(self.model.named_modules())
        names = modules_of(self.plan)
        if missing := [name for name in names if name not in by_name]:
            raise PlanMismatchError(f"the plan checkpoints {missing[0]!r}, which this model does not have")
        return tuple((by_name[name], self.plan.kept.get(name, {})) for name in names)


@contextmanager
def _checkpointed(chosen: tuple[tuple[nn.Module, Kept], ...]) -> Iterator[None]:
    """Let calls of these modules be checkpointed."""
    before = [(module, installed_call(module)) for module, _ in chosen]
    for module, kept in chosen:
        install_call(module, partial(_run, module, kept))
    try:
        yield
    finally:
        for module, call in before:
            uninstall_call(module) if call is None else install_call(module, call)


def _run(module: nn.Module, kept: Kept, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call_implementation(module)(*args, **kwargs)
    # What a second run goes through is the module's own call: it is not checkpointed again.
    run = partial(call_implementation(module), **kwargs) if kwargs else call_implementation(module)
    context_fn = partial(contexts, module, kept)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=True, context_fn=context_fn, debug=False)


def _plan(model: nn.Module, inputs: Inputs, options: Options, reuse: Plan | None, must_match: bool) -> Plan:
    check_device(model, inputs)
    check_own_checkpointing(model)
    return plan_eager(model, inputs, options, reuse=reuse, must_match=must_match)


class _Modules:
    name = "modules"
    summary = "the model itself, with chosen modules under torch.utils.checkpoint: no capture"
    tolerance = 0.0
    exact_peak = True

    def plan(
        self, model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
    ) -> Plan:
        return _plan(model, inputs, options, reuse, must_match)

    def start(
        self,
        model: nn.Module,
        options: Options,
        *,
        plan: Plan | None = None,
        replan: bool = True,
        prepare: Prepare | None = None,
    ) -> ModulesRuntime:
        return ModulesRuntime(model, options, plan=plan, replan=replan, prepare=prepare)


RUNTIME = _Modules()
