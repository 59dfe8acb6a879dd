"""Steps whose control flow differs between calls of equal inputs: dropped layers, experts, routing.

A plan is made for recorded steps. Where a forward's control flow draws random numbers, several steps are recorded, and
a module that any of them needs checkpointed is checkpointed in all. Every call is watched. One that calls modules more
often than the recorded steps did, gives them larger inputs, or has a setting that was off (a dropout of probability 0)
may break the budget: a warning says so, and the next call is planned for it too.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from planner.analysis.study import Study
from planner.capture.state_restore import HostStates, random_states_kept, seed_all
from planner.capture.torch_internals import installed_call
from planner.capture.trees import leaf_tensors
from planner.errors import CaptureError, InfeasibleBudgetError
from planner.ir.layers import is_within
from planner.plans.module_choices import modules_of
from planner.plans.plan import Plan

TRIES = 8
"""How many steps are recorded of a forward that draws random numbers."""

Kept = Mapping[str, Sequence[int]]
"""For each operator, the indices of its calls in a module whose results are saved."""

Keeps = Callable[[Study, Mapping[str, Kept]], bool]


@dataclass
class CallProfile:
    """What one step ran: by module path, its calls and the number of elements in its inputs."""

    calls: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    settings: set[str] = field(default_factory=set)
    """Names of float attributes of these modules that are not 0: a probability of 0 switches a module off."""

    def covers(self, other: CallProfile) -> bool:
        """Whether another step ran no more than this one."""
        return other.calls <= self.calls and other.elements <= self.elements and other.settings <= self.settings

    def beyond(self, other: CallProfile) -> list[str]:
        """Return the modules and settings in which this step goes beyond another."""
        more = (self.calls - other.calls) | (self.elements - other.elements)
        return [*more, *sorted(self.settings - other.settings)]

    def note(self, name: str, module: nn.Module, given: object) -> None:
        """Note a call of a module."""
        self.calls[name] += 1
        self.elements[name] += sum(tensor.numel() for tensor in leaf_tensors(given))
        self.note_settings(name, module)

    def note_settings(self, name: str, module: nn.Module) -> None:
        """Note the settings of a module that runs."""
        at = f"{name}." if name else ""
        self.settings.update(f"{at}{key}" for key, value in vars(module).items() if type(value) is float and value)


class Routes:
    """The recorded steps of one situation, their plans, and the modules checkpointed in all of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {m: name for name, m in model.named_modules() if m is not model and installed_call(m) is None}
        self._course = CallProfile()
        self._begun: HostStates | None = None
        """The random states that the call began with."""
        self._missed: HostStates | None = None
        """Random states at the start of a call that no plan covered, until it is planned."""
        self._misses = 0
        self._draws = False
        self._covered: list[CallProfile] = []
        self._studies: list[Study] = []
        self.plans: list[Plan] = []
        self.chosen: dict[str, Kept] = {}
        """The modules that are checkpointed in all these steps, and what each keeps."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the modules that a call runs; recompute in the backward's threads is left out."""
        here = get_ident()

        def begins(module: nn.Module, given: tuple[object, ...]) -> None:
            if get_ident() == here:
                self._begins(module, given)

        hook = register_module_forward_pre_hook(begins)
        try:
            yield
        finally:
            hook.remove()

    def _begins(self, module: nn.Module, given: tuple[object, ...]) -> None:
        if module is self._model:
            self._course = CallProfile()
            self._course.note_settings("", module)
            self._begun = HostStates()
        elif module in self._names:
            self._course.note(self._names[module], module, given)

    def _ends(self, module: nn.Module, _given: object, _result: object) -> None:
        if module is self._model:
            self._draws = self._begun != HostStates()

    def plan(self, record: Callable[[], Study], plan: Callable[[Study], Plan], keeps: Keeps) -> Plan:
        """Record steps and plan them, the largest first; return the plan with the highest peak.

        ``keeps`` says whether a step keeps the budget with given modules checkpointed. A warning names steps that the
        choice does not fit; InfeasibleBudgetError if it fits none.
        """
        refused: list[str] = []
        infeasible: InfeasibleBudgetError | None = None
        for course, study in sorted(self._recorded(record), key=lambda each: -each[1].whole_bytes):
            self._covered.append(course)
            self._studies.append(study)
            if self.plans and keeps(study, self.chosen):
                continue
            try:
                made = plan(study)
            except InfeasibleBudgetError as error:
                infeasible = error
                refused.append(str(error))
                continue
            together = outermost({**{name: made.kept.get(name, {}) for name in modules_of(made)}, **self.chosen})
            if not self.plans or all(keeps(other, together) for other in self._studies):
                self.chosen = together
            else:
                refused.append("the modules that one needs checkpointed break another")
            self.plans.append(made)
        self._missed = None
        if infeasible is not None and not self.plans:
            raise infeasible
        for why in refused:
            warnings.warn(f"some steps of {type(self._model).__name__} break the budget: {why}", stacklevel=5)
        return max(self.plans, key=lambda plan: plan.peak_bytes)

    def _recorded(self, record: Callable[[], Study]) -> Iterator[tuple[CallProfile, Study]]:
        """Record steps of other control flow: the one that no plan covered, or several with other random states."""
        seen = [*self._covered]
        with random_states_kept():
            if self._missed is not None:
                self._missed.restore()
            for number in range(TRIES):
                try:
                    with self.watched(), _hook_at_the_end(self._ends):
                        study = record()
                except CaptureError:
                    if number == 0:
                        raise
                    continue  # a step that trains nothing, say, because it drops every layer
                finally:
                    seed_all(number)
                if not any(course.covers(self._course) for course in seen):
                    seen.append(self._course)
                    yield seen[-1], study
                # What data decides is not tried: other random numbers would not show it.
                if self._missed is not None or not (study.draws or (self._draws and not study.varies)):
                    return

    def are_left(self, *, are_shared: bool) -> bool:
        """Warn if the watched call went beyond all planned steps, and say whether the next call is to be planned.

        ``are_shared``: other ranks must plan together with this one, which they do not if only this rank's data
        differed.
        """
        if self._misses == TRIES or any(course.covers(self._course) for course in self._covered):
            return False
        is_last = are_shared and any(study.varies for study in self._studies)
        self._misses = TRIES if is_last else self._misses + 1
        self._missed = self._begun
        differs, more = self._difference()
        then = "the next is planned for such steps too" if self._misses < TRIES else "others may too, unplanned"
        warnings.warn(
            f"{type(self._model).__name__} {differs} in this step than in those that it was planned for "
            f"({', '.join(more[:3])}{', ...' if len(more) > 3 else ''}): it may break the budget, and {then}",
            stacklevel=5,
        )
        return not is_last

    def _difference(self) -> tuple[str, list[str]]:
        now = self._course
        often = Counter({name: max(course.calls[name] for course in self._covered) for name in now.calls})
        if more := [*(now.calls - often)]:
            return "runs other modules", more
        much = Counter({name: max(course.elements[name] for course in self._covered) for name in now.elements})
        if more := [*(now.elements - much)]:
            return "gives modules more", more
        if more := sorted(now.settings.difference(*(course.settings for course in self._covered))):
            return "has other settings", more
        return "runs other modules", [*now.calls]


def outermost(chosen: Mapping[str, Kept]) -> dict[str, Kept]:
    """Drop modules inside other chosen modules: a checkpointed module is recomputed as a whole."""
    return {n: kept for n, kept in chosen.items() if not any(is_within(n, other) for other in chosen if other != n)}


@contextmanager
def _hook_at_the_end(hook: Callable[[nn.Module, object, object], None]) -> Iterator[None]:
    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
