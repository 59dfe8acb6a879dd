"""Measure whole steps as a loop runs them: from a call of a wrapped model to the end of the last backward of its calls.

A step holds what no plan knows beforehand: a loss outside the model, several calls before a backward, other models.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planner.capture.inputs import differentiable_in
from planner.capture.memory import AllocationLog
from planner.capture.torch_internals import at_end_of_backward, is_in_backward, keeps_graph, storage_of, storages_on_cpu
from planner.common.units import round_up
from planner.ir.static_memory import LossMemory

if TYPE_CHECKING:
    from planner.plans.plan import CallMemory, Plan
    from planner.runtimes._observed import ObservedCalls

_CALLED, _RETURNED, _ENDED = "a call begins", "a call returned", "a backward ended"
_BEGUN, _KEEPING = "its backward begins", "a backward of it that keeps the graph begins"


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a logged step: what it held at most and left at its end, above what was there when it began.

    If it is the forward or a backward of a call: which call, and the field of ``CallMemory`` that says what it holds.
    """

    most_bytes: int
    left_bytes: int
    call: int = -1
    passes: str = ""


def replayed_peak(parts: Sequence[Part], calls: Sequence[tuple[CallMemory, CallMemory]]) -> int:
    """Return the most bytes that a logged step holds if its calls have another plan, above what it began with.

    For each call is given what it held by its plan, and what it holds by the other. All between calls stays as it was.
    """
    peak_bytes = held_bytes = 0
    for part in parts:
        more_bytes, left_bytes = 0, part.left_bytes
        if part.passes:
            before, now = calls[part.call]
            saved_bytes = now.saved_bytes - before.saved_bytes
            more_bytes = getattr(now, part.passes) - getattr(before, part.passes)
            if part.passes != "forward_bytes":
                more_bytes -= saved_bytes  # which is there when it begins
            left_bytes += {"forward_bytes": saved_bytes, "backward_bytes": -saved_bytes}.get(part.passes, 0)
        peak_bytes = max(peak_bytes, held_bytes + part.most_bytes + more_bytes, held_bytes + left_bytes)
        held_bytes += left_bytes
    return peak_bytes


@dataclass(frozen=True)
class LoggedStep:
    """What a step held at most, what it found when it began, and its parts, so that it can be replayed.

    Of its calls is known what each held by the plan that was in force, if that can be said, and what they are like.
    """

    held_bytes: int
    found_bytes: int
    parts: tuple[Part, ...]
    calls: tuple[tuple[weakref.ref[ObservedCalls], CallMemory | None], ...]
    kinds: frozenset[int]
    is_cut: bool = False
    """Whether the backward of one of its calls never came: it was interrupted, say."""

    def models(self) -> list[ObservedCalls]:
        """Return the models of its calls, once for each call."""
        return [model for reference, _ in self.calls if (model := reference()) is not None]

    def under(self, of: ObservedCalls, plan: Plan) -> int | None:
        """Return what it holds at most if one model has another plan, and all others the one that is in force."""
        calls = []
        for reference, before in self.calls:
            model = reference()
            now = plan if model is of else model.plan if model is not None else None
            if before is None or now is None or now.call_memory is None:
                return None
            calls.append((before, now.call_memory))
        return self.found_bytes + replayed_peak(self.parts, calls)


class _Call:
    """A call that awaits its backward; hooks on its autograd graph keep this alive as long as the graph is."""

    def __init__(self, step: WholeStep, of: ObservedCalls) -> None:
        self.step, self.of, self.has_begun = weakref.ref(step), weakref.ref(of), False
        self._number = len(step.calls)
        """Which of the step's calls it is."""

    def begin(self, gradients: Any) -> None:
        """Note that the backward comes to this call."""
        if (step := self.step()) is not None:
            step.begun(gradients, self._number)
        self.has_begun = True


_calls: weakref.WeakSet[_Call] = weakref.WeakSet()
"""Of all wrapped models and all threads."""
_lock = threading.Lock()
_seen: weakref.WeakSet[Any] = weakref.WeakSet()
"""Storages that were made in a log on a CPU: torch's profiler sees what it saw come go, also later."""


class _Here(threading.local):
    step: WholeStep | None = None
    """The step that this thread is in, or was in last."""

    def goes_on(self) -> bool:
        """Whether a call of this step awaits its backward."""
        with _lock:
            return self.step is not None and any(c.step() is self.step and not c.has_begun for c in _calls)


_here = _Here()


def awaiting() -> list[ObservedCalls]:
    """Return the wrapped models whose backward has not begun, once for each call."""
    with _lock:
        return [of for call in _calls if not call.has_begun and (of := call.of()) is not None]


class WholeStep:
    """The calls of wrapped models until all their backwards have begun."""

    def __init__(self, log: AllocationLog | None, alignment_bytes: int, models: list[ObservedCalls]) -> None:
        self._expected = [weakref.ref(model) for model in models]
        self._log, self._alignment_bytes = log, alignment_bytes
        self._marks: list[tuple[str, int]] = []
        """What begins or ends there, of which call."""
        self.calls: list[tuple[weakref.ref[ObservedCalls], CallMemory | None]] = []
        """With what each of them holds by its plan, if it can be said."""
        self._found_bytes = 0
        """What is on the device before it, as far as a CPU shows it."""
        self._found: list[tuple[weakref.ref[Any], int]] = []
        """Tensors from before it, which a log on a CPU does not see go."""
        self._freed: list[int] = []
        """The bytes of these that went before each mark."""
        self._given_bytes, self._is_spoiled, self._is_differentiated = 0, False, False
        """Of the gradients of the outputs, when the first backward began; whether a model planned meanwhile; and
        whether a backward was itself differentiated."""
        self.inputs: weakref.WeakSet[Any] = weakref.WeakSet()
        """The storages of the inputs of its calls."""
        self._to_come: set[int] = set()
        """The calls whose backward has not begun."""
        self.kinds: set[int] = set()
        """What its calls are like."""

    @property
    def is_logged(self) -> bool:
        """Whether what it allocates is logged."""
        return self._log is not None

    def models(self) -> list[ObservedCalls]:
        """Return the wrapped models, once for each call; before the first, those expected."""
        calls = [each for each, _ in self.calls]
        return [model for each in calls or self._expected if (model := each()) is not None]

    def find(self, size_bytes: int, storages: list[Any]) -> None:
        """Count what a call of one of its models finds on the device: so many bytes, and storages that may go."""
        self._mark(_CALLED)
        self._found_bytes += size_bytes + sum(storage.nbytes() for storage in storages)
        if self._log is not None and self._log.found_bytes is None:
            self._found += [(weakref.ref(storage), storage.nbytes()) for storage in storages if storage not in _seen]

    def returned(self, calls: ObservedCalls, outputs: Any) -> None:
        """Take in a call that returned outputs."""
        starts = [output for output in differentiable_in(outputs) if output.grad_fn is not None]
        call = _Call(self, calls)
        for output in starts:
            output.grad_fn.register_prehook(call.begin)  # type: ignore[union-attr]
        with _lock:
            _calls.add(call)
        self._to_come.update([len(self.calls)] if starts else [])
        self.calls.append((weakref.ref(calls), calls.plan.call_memory if calls.plan is not None else None))
        if self._log is not None:
            self._mark(_RETURNED, len(self.calls) - 1)
            at_end_of_backward(starts, lambda: self._mark(_ENDED))

    def begun(self, gradients: Any, call: int) -> None:
        """Note that a backward comes to one of the calls with these gradients."""
        self._to_come.discard(call)
        last = next((what for what, of in reversed(self._marks) if what == _ENDED or of == call), "")
        if last not in (_RETURNED, _ENDED):
            return  # there is no log, or it comes to another of its outputs
        if torch.is_grad_enabled():
            self.calls[call] = self.calls[call][0], None  # what is run again is saved for a backward of this backward
            self._is_differentiated = True
        if last == _RETURNED:
            given = [g for g in gradients if isinstance(g, torch.Tensor) and g.layout is torch.strided]
            self._given_bytes = sum({id(s): s.nbytes() for s in map(storage_of, given)}.values())
        self._mark(_KEEPING if keeps_graph() else _BEGUN, call)

    def _mark(self, what: str, call: int = -1) -> None:
        if self._log is not None:
            self._marks.append((what, call))
            self._log.mark()
            self._freed.append(sum(size_bytes for storage, size_bytes in self._found if storage() is None))
            self._found = [(storage, size_bytes) for storage, size_bytes in self._found if storage() is not None]

    def close(self, *, is_spoiled: bool = False) -> None:
        """Stop the log, and tell the models what the step held, unless they planned meanwhile, which allocates too."""
        self._is_spoiled |= is_spoiled
        # A profiler that stops inside a backward is on again when that ends: the next start raised, or torch crashed.
        # Hooks of parameters step optimizers there.
        if is_in_backward():
            return
        if self._is_differentiated:  # the backward of a backward need not come to the call again, and holds more
            self._mark(_ENDED)
        log, self._log = self._log, None
        parts = log.stop() if log is not None else None
        if log is not None and log.found_bytes is None:
            _seen.update({*storages_on_cpu()} - {storage() for storage, _ in self._found})
        kinds = [kind for kind, _ in self._marks]
        if log is None or parts is None or self._is_spoiled or _ENDED not in kinds:
            return
        parts = [[round_up(abs(c), self._alignment_bytes) * (1 if c > 0 else -1) for c in part] for part in parts]
        for part, freed_bytes in zip(parts, self._freed, strict=False):
            part.append(-freed_bytes)  # some time before the mark that ends the part
        until = len(kinds) - kinds[::-1].index(_ENDED)
        found_bytes = self._found_bytes if log.found_bytes is None else log.found_bytes
        logged = LoggedStep(
            held_bytes=found_bytes + max(accumulate((c for part in parts[:until] for c in part), initial=0)),
            found_bytes=found_bytes,
            parts=tuple(self._parts(parts[:until])),
            calls=tuple(self.calls),
            kinds=frozenset(self.kinds),
            is_cut=bool(self._to_come),
        )
        for model in dict.fromkeys(self.models()):
            model.see_step(logged, self._loss(parts))

    def _parts(self, parts: list[list[int]]) -> Iterator[Part]:
        """Yield the parts of the log, with what they are of the step."""
        for changes, begins, ends in zip(parts, [(_CALLED, -1), *self._marks], self._marks, strict=False):
            passes = {_BEGUN: "backward_bytes", _KEEPING: "keeping_bytes"}.get(begins[0], "")
            call = begins[1] if passes else -1
            if ends[0] == _RETURNED:
                passes, call = "forward_bytes", ends[1]
            yield Part(max(accumulate(changes, initial=0)), sum(changes), call, passes)

    def _loss(self, parts: list[list[int]]) -> LossMemory | None:
        """Return the most that is beside outputs and their gradients between the only call and its backward."""
        if [call for _, call in self._marks[:3]] != [-1, 0, 0]:
            return None
        working_bytes = max(accumulate(parts[2], initial=0)) - self._given_bytes
        return LossMemory(working_bytes=max(0, working_bytes), is_known=True)


def step_with(calls: ObservedCalls, *, may_be_logged: bool) -> WholeStep:
    """Return the step that a call of a wrapped model belongs to: one that awaits a backward, or a new one.

    A new one is logged if its model asks for that, or one that was in the step before. ``may_be_logged`` says that the
    call is like an earlier one: a profiler would disturb what a capture measures.
    """
    before = _here.step
    if before is not None and (_here.goes_on() or (before.is_logged and is_in_backward())):
        if before.is_logged and not may_be_logged:
            before.close(is_spoiled=True)
        return before
    close_step()
    models = [calls, *(before.models() if before is not None else ())]
    is_asked = may_be_logged and any(model.wants_measure for model in models)
    device = calls.around.device()
    log = AllocationLog(device) if is_asked and AllocationLog.can_start(device) else None
    _here.step = step = WholeStep(log, calls.around.spec().alignment_bytes if is_asked else 1, models)
    return step


def close_step(*, is_spoiled: bool = False) -> None:
    """End the measurement of this thread's step, if there is one."""
    if _here.step is not None and _here.step.is_logged:
        _here.step.close(is_spoiled=is_spoiled)


def close_step_if_over(*_: Any) -> None:
    """End the measurement unless a backward is to come: of two models one may step, or be evaluated, before it."""
    if not _here.goes_on():
        close_step()


register_optimizer_step_pre_hook(close_step_if_over)
atexit.register(close_step)
