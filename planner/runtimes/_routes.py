"""Steps whose control flow differs between calls of equal inputs: dropped layers, experts, routing.

A plan is made for a recorded step. Where a forward's control flow draws random numbers, several steps are recorded, and
each that breaks the budget with the modules chosen so far is planned too. Every call is watched. One that calls modules
more often than the recorded steps did, gives them larger inputs, or has a setting that was off (a dropout of
probability 0) may break the budget: a warning says so, and the next call is planned for it too. What any of these plans
checkpoints is checkpointed in all such calls.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from planner.runtimes._whole_step import close_step

TRIES = 8
"""How many steps are recorded of a forward that draws random numbers."""

Kept = Mapping[str, Sequence[int]]
"""For each operator, the indices of its calls in a module whose results are saved."""

Keeps = Callable[[Study, Mapping[str, Kept]], bool]


class CallProfile:
    """What one step of a model runs: by module path, its calls and the number of elements in its inputs."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.settings: set[str] = set()
        """Names of float attributes of these modules that are not 0: a probability of 0 switches a module off."""
        self.note("", model, ())

    @property
    def size(self) -> tuple[int, int]:
        """How many calls there were, and how many elements they were given."""
        return self.calls.total(), self.elements.total()

    def beyond(self, other: CallProfile) -> list[str]:
        """Say in which modules and settings this step goes beyond another."""
        more = (self.calls - other.calls) | (self.elements - other.elements)
        return [f"{name}: more than planned" for name in (*more, *sorted(self.settings - other.settings))]

    def note(self, name: str, module: nn.Module, given: object) -> None:
        """Note a call of a module, and its settings."""
        self.calls[name] += 1
        self.elements[name] += sum(tensor.numel() for tensor in leaf_tensors(given))
        at = f"{name}." if name else ""
        self.settings.update(f"{at}{key}" for key, value in vars(module).items() if type(value) is float and value)


class Routes:
    """The recorded steps of one situation, and the modules checkpointed in all of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {m: name for name, m in model.named_modules() if m is not model and installed_call(m) is None}
        self._course = CallProfile(model)
        self._begun: HostStates | None = None
        """The random states that the call began with."""
        self._missed: HostStates | None = None
        """Random states at the start of a call that no plan covered, until it is planned."""
        self._misses = 0
        self._draws = False
        self._varies = False
        """Whether data decide what a recorded step runs."""
        self._covered: list[CallProfile] = []
        self._planned: list[Study] = []
        self.in_force: Plan | None = None
        """Of the plans of these steps, the one with the highest peak."""
        self.chosen: dict[str, Kept] = {}
        """The modules that are checkpointed in all these steps, and what each keeps."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the modules that a call runs; recompute in the backward's threads is left out."""
        here = get_ident()

        def begins(module: nn.Module, given: tuple[object, ...]) -> None:
            if get_ident() == here:
                self._begins(module, given)

        with register_module_forward_pre_hook(begins):
            yield

    def _begins(self, module: nn.Module, given: tuple[object, ...]) -> None:
        if module is self._model:
            self._course = CallProfile(module)
            self._begun = HostStates()
        elif module in self._names:
            self._course.note(self._names[module], module, given)

    def _ends(self, module: nn.Module, _given: object, _result: object) -> None:
        if module is self._model:
            self._draws = self._begun != HostStates()

    def plan(self, record: Callable[[], Study], plan: Callable[[Study], Plan], keeps: Keeps) -> Plan:
        """Record steps, plan the largest, and each other that breaks the budget with the modules chosen so far.

        ``keeps`` says whether a step keeps the budget with given modules checkpointed. Raises InfeasibleBudgetError if
        the first plan does not fit; if a later one does not, or they do not go together, a warning says so.
        """
        recorded = sorted(self._recorded(record), key=lambda each: -each[1].whole_bytes)
        self._missed = None
        for course, study in recorded:
            self._varies |= study.varies
            if self.in_force is None or not keeps(study, self.chosen):
                self._plan(study, plan, keeps)
            self._covered.append(course)
            self._planned.append(study)
        assert self.in_force is not None
        return self.in_force

    def _plan(self, study: Study, plan: Callable[[Study], Plan], keeps: Keeps) -> None:
        try:
            made = plan(study)
        except InfeasibleBudgetError as error:
            if self.in_force is None:
                raise
            self._refuse(str(error))
            return
        together = outermost({**{name: made.kept.get(name, {}) for name in modules_of(made)}, **self.chosen})
        if self.in_force is None or all(keeps(other, together) for other in (*self._planned, study)):
            self.chosen = together
        else:
            self._refuse("the modules that one must checkpoint break another")
        if self.in_force is None or made.peak_bytes > self.in_force.peak_bytes:
            self.in_force = made

    def _refuse(self, why: str) -> None:
        warnings.warn(f"some steps of {type(self._model).__name__} break the budget: {why}", stacklevel=7)

    def _recorded(self, record: Callable[[], Study]) -> Iterator[tuple[CallProfile, Study]]:
        """Record the step that no plan covered, or several with other random states, which run other modules."""
        seen: list[CallProfile] = []
        with random_states_kept():
            if self._missed is not None:
                self._missed.restore()
            for number in range(TRIES):
                try:
                    with self.watched(), register_module_forward_hook(self._ends):
                        study = record()
                except CaptureError:
                    if number == 0:
                        raise
                    continue  # a step that trains nothing, say, because it drops every layer
                finally:
                    seed_all(number)
                if all(self._course.beyond(course) for course in seen):
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
        if self._misses == TRIES:
            return False
        more = min((self._course.beyond(course) for course in self._covered), key=len)
        if not more:
            return False
        is_last = are_shared and self._varies
        self._misses = TRIES if is_last else self._misses + 1
        self._missed = self._begun
        warn_of_another(self._model, more, is_planned=self._misses < TRIES)
        return not is_last


def warn_of_another(model: nn.Module, differs: Sequence[str], *, is_planned: bool = True) -> None:
    """Warn that a step is another than the one that was planned."""
    close_step(is_spoiled=True)  # what it holds above its plan is not beside it
    then = "the next is planned for such steps too" if is_planned else "others may too, unplanned"
    warnings.warn(
        f"{type(model).__name__} does not run as planned ({'; '.join(differs[:3])}"
        f"{'; ...' if len(differs) > 3 else ''}): this step may break the budget, and {then}",
        stacklevel=6,
    )


def outermost(chosen: Mapping[str, Kept]) -> dict[str, Kept]:
    """Drop modules inside other chosen modules: a checkpointed module is recomputed as a whole."""
    return {n: kept for n, kept in chosen.items() if not any(is_within(n, other) for other in chosen if other != n)}
