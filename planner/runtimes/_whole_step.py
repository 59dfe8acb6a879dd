"""Measure whole steps as a loop runs them: from a call of a wrapped model to the end of the last backward of its calls.

A step holds what no plan knows beforehand: a loss outside the model, several calls before a backward, other models.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planner.capture.inputs import differentiable_in
from planner.capture.memory import AllocationLog
from planner.capture.torch_internals import at_end_of_backward, keeps_graph, storage_of
from planner.common.units import round_up
from planner.ir.static_memory import LossMemory

if TYPE_CHECKING:
    from planner.runtimes._observed import ObservedCalls

_RETURNED, _BEGUN, _ENDED = "a call returned", "its backward begins", "a backward ended"


class _Call:
    """A call that awaits its backward; hooks on its autograd graph keep this alive as long as the graph is."""

    def __init__(self, step: WholeStep, of: ObservedCalls) -> None:
        self.step, self.of, self.has_begun = weakref.ref(step), weakref.ref(of), False

    def begin(self, gradients: Any) -> None:
        """Note that the backward comes to this call."""
        step = self.step()
        if not self.has_begun and step is not None:
            step.begun(gradients)
        self.has_begun = True


_calls: weakref.WeakSet[_Call] = weakref.WeakSet()
"""Of all wrapped models and all threads."""
_lock = threading.Lock()


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
        self._marks: list[str] = []
        self.calls: list[weakref.ref[ObservedCalls]] = []
        self._own_bytes = self._other_bytes = 0
        """What is on the device before it, of its models and beside them, as far as a CPU shows it."""
        self._found: list[tuple[weakref.ref[Any], int]] = []
        """Tensors from before it, which a log on a CPU does not see go."""
        self._freed: list[int] = []
        """The bytes of these that went before each mark."""
        self._given_bytes = self._gone_bytes = 0
        """When the first backward began: the gradients of the outputs, and outputs that were dropped before."""
        self._outputs: list[tuple[weakref.ref[Any], int]] = []
        self.inputs: weakref.WeakSet[Any] = weakref.WeakSet()
        """The storages of the inputs of its calls."""
        self.kinds: set[int] = set()
        """What its calls are like."""
        self.keeps_graph = False
        """Whether one of its backwards kept the graph."""

    @property
    def is_logged(self) -> bool:
        """Whether what it allocates is logged."""
        return self._log is not None

    def models(self) -> list[ObservedCalls]:
        """Return the wrapped models, once for each call; before the first, those expected."""
        return [model for each in self.calls or self._expected if (model := each()) is not None]

    def find(self, own_bytes: int, own: list[Any], other: list[Any], *, sees_them_go: bool) -> None:
        """Count what one of its models has on the device, with storages of its own, and what is there beside it."""
        self._own_bytes += own_bytes + sum(storage.nbytes() for storage in own)
        self._other_bytes += sum(storage.nbytes() for storage in other)
        if self._log is not None and self._log.found_bytes is None and not sees_them_go:
            self._found += [(weakref.ref(storage), storage.nbytes()) for storage in (*own, *other)]

    def returned(self, calls: ObservedCalls, outputs: Any, storages: list[tuple[weakref.ref[Any], int]]) -> None:
        """Take in a call that returned outputs in these storages, with their bytes."""
        starts = [output for output in differentiable_in(outputs) if output.grad_fn is not None]
        call = _Call(self, calls)
        for output in starts:
            output.grad_fn.register_prehook(call.begin)  # type: ignore[union-attr]
        with _lock:
            _calls.add(call)
        self.calls.append(weakref.ref(calls))
        if self._log is not None:
            self._outputs += storages
            self._mark(_RETURNED)
            at_end_of_backward(starts, lambda: self._mark(_ENDED))

    def begun(self, gradients: Any) -> None:
        """Note that a backward comes to one of the calls with these gradients."""
        self.keeps_graph |= keeps_graph()
        if self._log is not None:
            given = [g for g in gradients if isinstance(g, torch.Tensor) and g.layout is torch.strided]
            self._given_bytes = sum({id(s): s.nbytes() for s in map(storage_of, given)}.values())
            self._gone_bytes = sum(size_bytes for storage, size_bytes in self._outputs if storage() is None)
            self._mark(_BEGUN)

    def _mark(self, what: str) -> None:
        if self._log is not None:
            self._marks.append(what)
            self._log.mark()
            self._freed.append(sum(size_bytes for storage, size_bytes in self._found if storage() is None))
            self._found = [(storage, size_bytes) for storage, size_bytes in self._found if storage() is not None]

    def close(self, *, is_spoiled: bool = False) -> None:
        """Stop the log, and tell the models what the step held, unless they planned meanwhile, which allocates too."""
        log, self._log = self._log, None
        parts = log.stop() if log is not None else None
        if log is None or parts is None or is_spoiled or _ENDED not in self._marks:
            return
        parts = [[round_up(abs(c), self._alignment_bytes) * (1 if c > 0 else -1) for c in part] for part in parts]
        for part, freed_bytes in zip(parts, self._freed, strict=False):
            part.append(-freed_bytes)  # some time before the mark that ends the part
        until = len(self._marks) - self._marks[::-1].index(_ENDED)
        peak_bytes = max(accumulate((c for part in parts[:until] for c in part), initial=0))
        found_bytes = self._own_bytes + self._other_bytes if log.found_bytes is None else log.found_bytes
        other_bytes = max(0, found_bytes - self._own_bytes)
        held_bytes = found_bytes + peak_bytes
        for model in dict.fromkeys(self.models()):
            model.see_step(self, held_bytes, other_bytes, self._loss(parts))

    def _loss(self, parts: list[list[int]]) -> LossMemory | None:
        """Return what is beside the outputs and their gradients between the only call and its backward."""
        if self._marks[:2] != [_RETURNED, _BEGUN]:
            return None
        changes = [*accumulate(parts[1], initial=0)]
        left_bytes = max(0, changes[-1] + self._gone_bytes - self._given_bytes)
        working_bytes = max(changes) - left_bytes - self._given_bytes
        return LossMemory(working_bytes=max(0, working_bytes), held_bytes=left_bytes, is_known=True)


def step_with(calls: ObservedCalls, *, may_be_logged: bool) -> WholeStep:
    """Return the step that a call of a wrapped model belongs to: one that awaits a backward, or a new one.

    A new one is logged if its model asks for that, or one that was in the step before. ``may_be_logged`` says that the
    call is like an earlier one: a profiler would disturb what a capture measures.
    """
    before = _here.step
    if before is not None and _here.goes_on():
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


def close_step() -> None:
    """End the measurement of this thread's step, if there is one."""
    if _here.step is not None and _here.step.is_logged:
        _here.step.close()


def close_step_if_over(*_: Any) -> None:
    """End the measurement unless a backward is to come: of two models one may step, or be evaluated, before it."""
    if _here.step is not None and _here.step.is_logged and not _here.goes_on():
        _here.step.close()


register_optimizer_step_pre_hook(close_step_if_over)
atexit.register(close_step)
