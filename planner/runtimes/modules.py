"""Runtime ``modules``: the eager model with chosen modules under ``torch.utils.checkpoint``; nothing is captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from planner.analysis.study import Study
from planner.capture.eager.graph import keeps_statistics
from planner.capture.inputs import Inputs
from planner.capture.model_facts import of_model, units_of, whole
from planner.capture.module_internals import lend, settings_of, tensors_held_by
from planner.capture.planned_call import calling, forwards, parts_run_as_they_are
from planner.capture.state_restore import HostStates
from planner.capture.torch_internals import call_implementation, version_of
from planner.errors import PlanMismatchError, RuntimeUnsupportedError, ScheduleError
from planner.ir.checkpoints import schedule_of
from planner.plans.module_choices import choices_in
from planner.plans.plan import Plan
from planner.runtimes._calls import CallsInSituations, Decided, RuntimeOfCalls, check_sharding
from planner.runtimes._routes import Kept, Routes
from planner.session.eager_study import plan_alike, plan_eager, study_alike
from planner.session.rank_consensus import who_agrees
from planner.session.step import Options


class ModulesRuntime(CallsInSituations):
    """What ``model(...)`` runs while a plan is in force.

    The first call with gradients records a step and plans it; calls of other sizes or settings are
    recorded again, and the choice of modules is carried over if the simulator says that it fits. So are
    calls that run other modules: see :mod:`planner.runtimes._routes`.
    """

    needs_graphs = False

    def __init__(self, model: nn.Module, options: Options, **settings: Any) -> None:
        super().__init__(model, options, **settings)
        self._routes: dict[Any, Routes] = {}

    def decide(self, inputs: Inputs) -> Decided:
        """Record a step, or several that differ, and choose modules."""
        with whole(self.model):
            decided = self._decide(inputs)
        check_sharding(self.model)
        return decided

    def _decide(self, inputs: Inputs) -> Decided:
        self.complete_options(inputs)
        situation = self.situation(inputs)
        routes = self._routes.setdefault(situation, Routes(self.model))
        # Recorded here, and not taken from what was recorded before: it is seen which modules run.
        options = replace(self.options_for_call(), eager=None)
        plan = routes.plan(lambda: study_alike(self.model, inputs, options), self._planned, self._keeps)
        checkpointed = routes.chosen
        by_name = dict(self.model.named_modules())
        if missing := [name for name in checkpointed if name not in by_name]:
            raise PlanMismatchError(f"the plan is for {missing[0]!r}, a module that this model does not have")
        device = of_model(self.model, inputs.args, inputs.kwargs)
        units = {module for unit in units_of(self.model) for module in unit.modules}
        installed = partial(_installed, device, {by_name[name]: kept for name, kept in checkpointed.items()}, units)
        return plan, partial(self._watched, situation, installed)

    def _planned(self, study: Study) -> Plan:
        plan = plan_alike(self.model, study, self.options_for_call(), **self.known)
        self.put_in_force(plan)
        self.is_confirmed = True
        return plan

    def _keeps(self, study: Study, chosen: Mapping[str, Kept]) -> bool:
        problem = study.posed(self.options.budget)
        assert problem.regions is not None
        try:
            schedule = schedule_of(problem.graph, choices_in(problem.regions, chosen))
            return problem.evaluate(schedule).peak_bytes <= problem.budget_bytes
        except ScheduleError:  # a module, and one inside it
            return False

    @contextmanager
    def _watched(self, situation: Any, installed: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Install what was decided for a call, and see afterwards whether it was for such a call."""
        routes = self._routes[situation]
        with routes.watched(), installed():
            yield
        if routes.are_left(are_shared=bool(who_agrees(self.model, self.options))):
            del self._decided[situation]  # the next such call is decided anew


@contextmanager
def _installed(
    device: torch.device, checkpointed: Mapping[nn.Module, Kept], units: Collection[nn.Module]
) -> Iterator[None]:
    """Let calls of modules be checkpointed; around ``units`` FSDP2 gathers parameters."""
    where = torch.empty(0, device=device)
    with ExitStack() as stack:
        for module, kept in checkpointed.items():
            # What a second run goes through is the module's own call: it is not checkpointed again. That of a unit is
            # its forward alone: it finds its parameters gathered.
            call = module.forward if module in units else call_implementation(module)
            run = partial(_run, module, call, kept, where)
            stack.enter_context(forwards({module: run}) if module in units else calling({module: run}))
        # Autocast around the call would keep every weight that it has cast until the caller leaves it.
        stack.callback(torch.clear_autocast_cache)
        yield


def _run(
    module: nn.Module, call: Callable[..., Any], kept: Kept, where: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    # Torch puts back the random states of the devices that positional arguments are on, and of no others.
    around = partial(contexts, module, kept)
    return checkpoint(lambda _, *given: call(*given, **kwargs), where, *args, context_fn=around, use_reentrant=False)


# What a checkpointed module runs under, in the forward and when it runs again.


def contexts(module: nn.Module, kept: Kept) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return a context for the forward of a module, and one for its further runs."""
    if not kept:
        return nullcontext(), _Again(module, None)
    keeping, giving = create_selective_checkpoint_contexts(_Policy(kept))
    return _Only(kept, keeping), _Again(module, _Only(kept, giving))


_name_of = cache(str)
"""An operator's name, which Python would write anew for each that a module calls."""


class _Policy:
    """Counts the calls of each operator, and says which are kept."""

    def __init__(self, kept: Kept) -> None:
        self.kept = {operator: frozenset(occurrences) for operator, occurrences in kept.items()}
        self.called: Counter[tuple[bool, str]] = Counter()
        """Apart for both runs: up to torch 2.12 the second asks too."""

    def __call__(self, context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        called = (context.is_recompute, _name_of(function))
        occurrence = self.called[called]
        self.called[called] += 1
        kept = occurrence in self.kept[called[1]]
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
        if _name_of(function) in self.operators:
            return self.mode.__torch_dispatch__(function, types, args, kwargs)
        return function(*args, **(kwargs or {}))


class _Again(AbstractContextManager[None]):
    """Gives the second run what was kept, what the first drew from Python's and numpy's random states, and its state.

    These are the tensors that the module had then: ``torch.func.functional_call`` lends it others for a call. A tensor
    that was written into since is refused. No further run touches running statistics, but copies of them. Modes,
    numbers, hooks and parts are those of then too, and what a further run does to them leaves no trace: it counts
    nothing twice.

    What was kept is given once: a third run, as for a second backward, computes everything.
    """

    def __init__(self, module: nn.Module, giving: TorchDispatchMode | None) -> None:
        self.module = module
        self.giving = giving
        self.stack = ExitStack()
        self.drawn_from = HostStates()
        parts = list(module.modules())
        self.settings = [(part, settings_of(part)) for part in parts]
        self.read = [(table, name, t, version_of(t), t.requires_grad) for table, name, t in _read_by(parts)]
        self.statistics = list(filter(keeps_statistics, parts))

    def __enter__(self) -> None:
        self.stack.enter_context(parts_run_as_they_are())  # as in the forward
        self.stack.callback(HostStates().restore)
        self.drawn_from.restore()
        for part, settings in self.settings:
            self.stack.callback(lend(part, settings))
        for table, name, tensor, version, trains in self.read:
            if version_of(tensor) != version:
                self.stack.close()
                raise _changed(self.module, name)
            if tensor.requires_grad != trains:  # it was frozen since, say
                self.stack.callback(tensor.requires_grad_, tensor.requires_grad)
                tensor.requires_grad_(trains)
            if (now := table.get(name)) is not tensor:
                self.stack.callback(table.__setitem__, name, now)
                table[name] = tensor
        for part in self.statistics:
            for name, buffer in part.named_buffers(recurse=False):
                self.stack.callback(setattr, part, name, buffer)
                setattr(part, name, buffer.clone())
        if self.giving is not None:
            self.stack.enter_context(self.giving)
            self.giving = None

    def __exit__(self, *raised: Any) -> None:
        self.stack.__exit__(*raised)


def _read_by(parts: Collection[nn.Module]) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Return the tensors of some modules, but for running statistics, and where each is kept."""
    for part in parts:
        yield from tensors_held_by(part, buffers=not keeps_statistics(part))
        held = vars(part)
        yield from ((held, name, value) for name, value in held.items() if isinstance(value, torch.Tensor))


def _changed(module: nn.Module, name: str) -> RuntimeUnsupportedError:
    return RuntimeUnsupportedError(
        f"{name!r} of a module {type(module).__name__} was changed in place between the forward and its backward. The "
        "plan recomputes the module in the backward, which would read the new numbers. Change it after the backward"
    )


class _Modules(RuntimeOfCalls):
    calls = ModulesRuntime
    name = "modules"
    summary = "the model itself, with chosen modules under torch.utils.checkpoint: no capture"
    runs_sharded = True
    runs_compiled_parts = True
    plan = staticmethod(plan_eager)


RUNTIME = _Modules()
