"""Runs the model as it is: nothing is captured.

Chosen modules are under ``torch.utils.checkpoint``, or under hooks that send to the host what they save, or both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from planner.capture.eager.graph import keeps_statistics
from planner.capture.inputs import Inputs
from planner.capture.torch_internals import call_implementation, calling
from planner.errors import PlanMismatchError
from planner.plans.module_choices import modules_of
from planner.plans.offload import OffloadedModule
from planner.runtimes._calls import CallsInSituations, Decided, StartsCalls
from planner.runtimes._hooks import Waiting, split_arguments
from planner.session.step import plan_eager

Kept = Mapping[str, Sequence[int]]
"""For an operator, those of its calls within a module whose results are kept."""


class ModulesRuntime(CallsInSituations):
    """What ``model(...)`` runs while a plan is in force.

    The first call with gradients records a step and plans it; calls of other sizes or settings are
    recorded again, and the choice of modules is carried over if the simulator says that it fits.
    """

    needs_graphs = False

    def decide(self, inputs: Inputs) -> Decided:
        """Record a step, and choose modules."""
        self.complete_options(inputs)
        plan = plan_eager(self.model, inputs, self.options, reuse=self.plan, must_match=self.must_match)
        self.put_in_force(plan)
        by_name = dict(self.model.named_modules())
        offloaded = plan.offloading.modules if plan.offloading is not None else ()
        names = dict.fromkeys((*modules_of(plan), *(one.module for one in offloaded)))
        if missing := [name for name in names if name not in by_name]:
            raise PlanMismatchError(f"the plan is for {missing[0]!r}, a module that this model does not have")
        self.is_confirmed = True
        checkpointed = {name: plan.kept.get(name, {}) for name in modules_of(plan)}
        return plan, partial(_installed, {name: by_name[name] for name in names}, checkpointed, offloaded)


@contextmanager
def _installed(
    modules: Mapping[str, nn.Module], checkpointed: Mapping[str, Kept], offloaded: Sequence[OffloadedModule]
) -> Iterator[None]:
    """Let calls of modules be checkpointed, and send what they save."""
    waiting = Waiting(offloaded)
    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(calling(module, partial(_run, name, module, checkpointed.get(name), waiting)))
        stack.callback(waiting.end)
        yield


def _run(name: str, module: nn.Module, kept: Kept | None, waiting: Waiting, *args: Any, **kwargs: Any) -> Any:
    # What a second run goes through is the module's own call: it is not checkpointed again.
    call = call_implementation(module)
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    if kept is None:
        with waiting.saving(name):
            result = call(*args, **kwargs)
    elif name in waiting.of:
        run, tensors = split_arguments(call, args, kwargs)
        with waiting.given(name, tensors):
            result = _checkpointed(run, module, kept, *tensors)
    else:
        result = _checkpointed(partial(call, **kwargs) if kwargs else call, module, kept, *args)
    waiting.ended(name)
    return result


def _checkpointed(call: Callable[..., Any], module: nn.Module, kept: Kept, *args: Any) -> Any:
    context_fn = partial(contexts, module, kept)
    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=True, context_fn=context_fn, debug=False)


# What a checkpointed module runs under, in the forward and when it runs again.


def contexts(module: nn.Module, kept: Kept) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return a context for the forward of a module, and one for its further runs."""
    if not kept:
        return nullcontext(), _Again(module, None)
    keeping, giving = create_selective_checkpoint_contexts(_Policy(kept))
    return _Only(kept, keeping), _Again(module, _Only(kept, giving))


class _Policy:
    """Counts the calls of each operator, and says which are kept."""

    def __init__(self, kept: Kept) -> None:
        self.kept = {operator: frozenset(occurrences) for operator, occurrences in kept.items()}
        self.called: Counter[tuple[bool, str]] = Counter()
        """Apart for both runs: up to torch 2.12 the second asks too."""

    def __call__(self, context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        called = (context.is_recompute, str(function))
        occurrence = self.called[called]
        self.called[called] += 1
        kept = occurrence in self.kept[str(function)]
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE


class _Only(TorchDispatchMode):
    """Lets one of torch's two modes see nothing but the operators of which something is kept.

    They refuse a second run that calls any operator more often than the first, as autocast does where a weight was
    cast before.
    """

    def __init__(self, kept: Kept, mode: Any) -> None:
        super().__init__()
        self.operators = frozenset(kept)
        self.mode = mode

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) in self.operators:
            return self.mode.__torch_dispatch__(function, types, args, kwargs)
        return function(*args, **(kwargs or {}))


class _Again(AbstractContextManager[None]):
    """Gives the second run what was kept, and lets no further run touch running statistics, but copies of them.

    What was kept is given once: a third run, as for a second backward, computes everything.
    """

    def __init__(self, module: nn.Module, giving: TorchDispatchMode | None) -> None:
        self.module = module
        self.giving = giving
        self.stack = ExitStack()

    def __enter__(self) -> None:
        for part in filter(keeps_statistics, self.module.modules()):
            for name, buffer in part.named_buffers(recurse=False):
                self.stack.callback(setattr, part, name, buffer)
                setattr(part, name, buffer.clone())
        if self.giving is not None:
            self.stack.enter_context(self.giving)
            self.giving = None

    def __exit__(self, *raised: Any) -> None:
        self.stack.__exit__(*raised)


class _Modules(StartsCalls):
    calls = ModulesRuntime
    name = "modules"
    summary = "the model itself, with chosen modules under torch.utils.checkpoint: no capture"
    plan = staticmethod(plan_eager)


RUNTIME = _Modules()
